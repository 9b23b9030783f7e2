"""Exceptions of operators that get tensors of another shape, type or kind than they want.

The address next to a text is where PyTorch (or the library) raises it.
"""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

#: Types of whole numbers, as PyTorch's messages have them.
_WHOLE: Final = (
    r"(?:torch\.(?:cuda\.)?)?(?:Byte|Char|Short|Int|Long|Bool|unsigned char|signed char|short"
    r"|int|long(?: int)?|bool)(?:Tensor)?"
)
#: What of a tensor is asked for of something that is none.
_OF_TENSORS: Final = (
    r"(?:size|dim|shape|view|squeeze|log_softmax|backward|argmax|detach|item|float)"
)

_KNOWN: Final = (
    # aten/src/ATen/native/LossNLL.cpp
    KnownError(
        "classes_dimension",
        re.compile(r"Expected target size \[[\d, ]+\], got \[[\d, ]+\]"),
        "The classes are in another dimension than the loss expects: right after the batch",
        "output.transpose(1, 2), so that (batch, length, classes) becomes (batch, classes, "
        "length), or output.flatten(0, 1) with y.flatten()",
    ),
    # aten/src/ATen/native/transformers/cuda/attention.cu
    KnownError(
        "no_attention_kernel",
        re.compile(r"No available kernel\.\s+Aborting execution"),
        "scaled_dot_product_attention may use none of its kernels here: those that sdpa_kernel() "
        "allows do not bear these tensors (flash needs float16 or bfloat16, and no mask)",
        "run it inside torch.autocast (evaluation and sampling, too: a copy of the weights that "
        "was made before accelerator.prepare has none), or allow SDPBackend.EFFICIENT_ATTENTION "
        "and SDPBackend.MATH as well",
    ),
    # aten/src/ATen/native/TensorShape.cpp, TensorUtils.cpp
    KnownError(
        "not_contiguous",
        re.compile(r"view size is not compatible with input tensor's size and stride"),
        "view() is asked of a tensor whose numbers lie in another order in memory, after "
        "transpose, permute or a slice",
        ".reshape(…) instead of .view(…), or .contiguous() before it; check that it mixes no "
        "dimensions that belong apart",
    ),
    KnownError(
        "reshape_size",
        re.compile(r"shape '\[[-\d, ]*\]' is invalid for input of size \d+"),
        "view() or reshape() asks for another number of elements than there are",
        "x.size(0) in place of a batch size that is written out (the last batch is smaller), and "
        "x.flatten(1) before a linear layer whose in_features are by the size of the data",
    ),
    # torch/csrc/utils/python_arg_parser.cpp; what recurrent layers and models of libraries give
    KnownError(
        "targets_as_list",
        re.compile(r"argument 'target' \(position 2\) must be Tensor, not (?:tuple|list)"),
        "The targets of the loss are a list or a tuple: collation leaves text as it is, and makes "
        "a list of each sample's list",
        "number the classes in the data set, {name: i for i, name in enumerate(sorted(names))}, "
        "and return that number; of several numbers for a sample return a tensor",
    ),
    KnownError(
        "several_outputs",
        re.compile(
            r"must be Tensor, not (?:tuple|\w*Outputs?\w*)\b"
            rf"|'(?:tuple|\w*Outputs?\w*)' object has no attribute '{_OF_TENSORS}'"
        ),
        "Several tensors are where one is wanted: a module's outputs, or a whole batch",
        "take the one that is meant: output, _ = lstm(x) of recurrent layers and attention (in "
        "nn.Sequential a module of your own that does so), model(**batch).logits of Transformers', "
        "output, aux = model(x) of Inception in training (or aux_logits=False); x, y = batch",
    ),
    KnownError(
        "no_output",
        re.compile(
            rf"must be Tensor, not NoneType|'NoneType' object has no attribute '{_OF_TENSORS}'"
        ),
        "None is where a tensor is wanted: most often forward() ends without return",
        "return the result from forward(); of Transformers' models give labels where .loss is "
        "wanted",
    ),
    KnownError(
        "batch_of_list",
        re.compile(
            r"must be Tensor, not (?:list|str|dict)\b"
            r"|'(?:list|tuple|dict|str)' object has no attribute '(?:to|cuda)'"
        ),
        "The batch has a list, a dict or text where a tensor is wanted: collation makes tensors of "
        "numbers and tensors only, and of lists one for each position",
        "return tensors from the data set (torch.tensor(labels), text as token ids), and move "
        "each part: {name: each.to(device) for name, each in batch.items()}",
    ),
    # aten/src/ATen/native/Scalar.cpp, TensorShape.cpp
    KnownError(
        "bool_of_tensor",
        re.compile(r"Boolean value of Tensor with more than one value is ambiguous"),
        "Several numbers are asked for one yes or no",
        "make a loss first, and call it then: criterion = nn.CrossEntropyLoss(), "
        "criterion(output, y) (its constructor has options); of conditions .any(), .all() or "
        "torch.where; x is not None instead of if x",
    ),
    # aten/src/ATen/native/TensorShape.h
    KnownError(
        "dimensions_to_join",
        re.compile(r"Tensors must have same number of dimensions: got \d+ and \d+"),
        "torch.cat joins tensors with as many dimensions each, and these have not",
        "x.flatten(1) of what a convolution gives (N, C, H, W), before it is joined with (N, F); "
        "x.unsqueeze(dim) of the one that lacks a dimension, expanded to the other's size",
    ),
    # aten/src/ATen/native/LossCTC.cpp
    KnownError(
        "steps_first",
        re.compile(
            r"(?:input|target)_lengths must be of size batch_size"
            r"|Expected input_lengths to have value at most \d+"
        ),
        "ctc_loss gets its input with the batch first, or lengths that are not of its steps",
        "ctc_loss wants (steps, batch, classes): log_probs.transpose(0, 1) of (batch, steps, "
        "classes); one length for each sample, in steps of the model's output (a convolution with "
        "a stride gives fewer than the input has)",
    ),
    KnownError(
        "sizes_to_join",
        re.compile(r"Sizes of tensors must match except in dimension \d+"),
        "torch.cat joins tensors that differ in another dimension, too",
        "of a skip connection: sizes that each halving divides (pad them), or "
        "F.interpolate(x, size=skip.shape[-2:]) before it; of sequences: pad to one length; dim=…",
    ),
    # aten/src/ATen/ExpandUtils.cpp, TensorIterator.cpp
    KnownError(
        "sizes_differ",
        re.compile(
            r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)"
            r"|output with shape \[[\d, ]+\] doesn't match the broadcast shape \[[\d, ]+\]"
        ),
        "Two tensors that are put together number by number differ in size",
        "look at both shapes at this line: tokens beyond the model's positions (truncation=True, "
        "max_length=…), grey images normalized by three channels' means "
        '(image.convert("RGB")), a shortcut whose stride or channels differ (a 1×1 convolution)',
    ),
    # aten/src/ATen/native/Convolution.cpp, Pool.h, ReflectionPad.cpp
    KnownError(
        "input_too_small",
        re.compile(
            r"Kernel size can't be greater than actual input size|Output size is too small"
            r"|Padding size should be less than the corresponding input dimension"
        ),
        "What a layer gets is smaller than its kernel: layers before it have halved it too often",
        "larger images, fewer poolings or strides, padding=…, or nn.AdaptiveAvgPool2d before the "
        "last layer; channels come before height and width",
    ),
    # torch/nn/modules/batchnorm.py, aten/src/ATen/native/Convolution.cpp, torch/nn/modules/rnn.py
    KnownError(
        "dimensions_differ",
        re.compile(
            r"expected \d+D(?: or \d+D)? input \(got \d+D input\)"
            r"|Expected \d+D \(unbatched\) or \d+D \(batched\) input"
            r"|input must have \d+ dimensions, got \d+"
            r"|non-empty [^\n]*\(batch mode\) tensor expected for input"
            r"|Got \dD input, but \w+ mode needs \dD input"
        ),
        "A layer gets a tensor of another number of dimensions",
        "BatchNorm1d after linear layers, BatchNorm2d after convolutions; x.unsqueeze(0) of one "
        "sample, x.unsqueeze(1) where the channel is missing, x.flatten(1) before linear layers",
    ),
    # aten/src/ATen/WrapDimUtils.h (c10/core/WrapDimMinimal.cpp)
    KnownError(
        "no_such_dimension",
        re.compile(
            r"Dimension out of range \(expected to be in range of"
            r"|number of dimensions in the tensor input does not match the length of the desired"
        ),
        "A tensor has fewer dimensions than this line expects",
        "squeeze() also removes the batch's dimension where a batch (the last one) has one sample: "
        "squeeze(1) or flatten(1); unsqueeze(0) makes a batch of one sample",
    ),
    # aten/src/ATen/native/LossNLL.cpp
    KnownError(
        "batch_squeezed",
        re.compile(r"size mismatch \(got input: \[\d+\], target: \[\d+\]\)"),
        "The output of a batch with one sample has lost the batch's dimension",
        "squeeze(1) or flatten(1) instead of squeeze(), which removes every dimension of size 1",
    ),
    KnownError(
        "single_number",
        re.compile(
            r"invalid index of a 0-dim tensor|iteration over a 0-d tensor|len\(\) of a 0-d tensor"
        ),
        "A tensor that is a single number is indexed or gone over",
        "loss.item() instead of loss[0] or loss.data[0]; squeeze(1) instead of squeeze(), which "
        "leaves a number of a batch with one sample",
    ),
    # torch/csrc/autograd/saved_variable.cpp, aten/src/ATen/core/VariableFallbackKernel.cpp
    KnownError(
        "inference_tensor",
        re.compile(
            r"Inference tensors cannot be saved for backward"
            r"|Inplace update to inference tensor outside InferenceMode"
            r"|Inference tensors do not track version counter"
        ),
        "What was computed under torch.inference_mode() is used in training",
        "torch.no_grad() instead of inference_mode() there, or x.clone() of it outside",
    ),
    # aten/src/ATen/TensorUtils.cpp, TensorAdvancedIndexing.cpp, Onehot.cpp
    KnownError(
        "index_type",
        re.compile(
            r"'indices' to have (?:one of the following )?scalar types?:? Long"
            r"|tensors used as indices must be|Expected dtype int(?:32/int)?64 for index"
            r"|one_hot is only applicable to index tensor"
        ),
        "Indices are given as floating-point numbers",
        "x.long() for an embedding, gather, scatter or one_hot; in the data set "
        "torch.tensor(ids, dtype=torch.long)",
    ),
    KnownError(
        "index_beyond",
        re.compile(
            r"index -?\d+ is out of bounds for dimension \d+ with size \d+"
            r"|Class values must be smaller than num_classes"
        ),
        "An index is beyond the end of its dimension",
        "number classes from 0, and make the table, one_hot or scatter as wide as the largest one "
        "+ 1; indices of samples that are joined (edges of a batch of graphs) need the number of "
        "rows before their sample added; on a GPU the same is a device-side assert",
    ),
    # aten/src/ATen/native/Convolution.cpp, ReduceOps.cpp, torch/csrc/autograd
    KnownError(
        "whole_numbers",
        re.compile(
            rf"[Ii]nput type \({_WHOLE}\) and (?:weight|bias) type"
            rf"|the same dtype,? but got:? {_WHOLE} (?:and|!=)"
            r"|could not infer output dtype\. Input dtype must be either a floating"
            r"|[Oo]nly Tensors of floating point (?:and complex )?dtype can require gradients"
            r"|Expected a floating point or complex tensor as input\. Got"
            r"|\w+\" not implemented for '(?:Byte|Char|Short|Int|Long|Bool)'"
        ),
        "Whole numbers are where floating-point ones are needed",
        "x.float() (images: x.float() / 255) in the data set or before the model; an accuracy is "
        "(output.argmax(1) == y).float().mean()",
    ),
    # aten/src/ATen/native/transformers/attention.cpp
    KnownError(
        "mask_type",
        re.compile(r"Expected attn_mask dtype to be bool or float"),
        "scaled_dot_product_attention gets a mask of whole numbers (a tokenizer's attention_mask)",
        "mask.bool() where 1 stands for what is seen, of shape (batch, 1, 1, keys)",
    ),
    # AT_DISPATCH of an operator (aten/src/ATen/Dispatch.h)
    KnownError(
        "type_unsupported",
        re.compile(
            r"\"\w+\" not implemented for '(?:Half|BFloat16|Float8\w+)'"
            r"|Low precision dtypes not supported"
        ),
        "This operator does not compute in 16 bits, on this device at least",
        "model and data to the GPU where they are meant to be there; else x.float() before it "
        '(torch.autocast("cuda", enabled=False) around it), or dtype=torch.float32',
    ),
    # aten/src/ATen/native/Loss.cpp
    KnownError(
        "no_probabilities",
        re.compile(r"all elements of (?:input|target) should be between 0 and 1"),
        "BCELoss gets numbers that are no probabilities",
        "BCEWithLogitsLoss on the output without a sigmoid; targets 0 or 1",
    ),
    # torch/csrc/autograd/functions/utils, python_anomaly_mode.cpp
    KnownError(
        "nan_in_backward",
        re.compile(r"Function '\w+' returned nan values in its \d+th output"),
        "A backward pass gave NaN, which anomaly mode reports",
        "its forward pass is in the trace above: sqrt, log, a norm or a division at 0 "
        "(torch.sqrt(x + 1e-8), clamp(min=…), before torch.where as well); float16 that overflows: "
        "bfloat16, or GradScaler without anomaly mode",
    ),
    # torch/csrc/autograd/VariableTypeUtils.h
    KnownError(
        "view_in_place",
        re.compile(
            r"is a view and is being modified inplace"
            r"|A view was created in no_grad mode and is being modified inplace"
        ),
        "A part of a tensor (unbind, split, chunk) is changed in place",
        "x = x + y instead of x += y, or .clone() of the part before it is changed",
    ),
    # torch/csrc/autograd/python_engine.cpp, engine.cpp
    KnownError(
        "gradient_of_unused",
        re.compile(r"One of the differentiated Tensors (?:does not require grad|appears to not)"),
        "torch.autograd.grad is asked for a gradient of what the result does not depend on",
        "x.requires_grad_() before the forward pass, and compute with that x itself (no copy, no "
        "detach()); allow_unused=True where it is meant",
    ),
    # torch/distributed/tensor/_dispatch.py
    KnownError(
        "partly_distributed",
        re.compile(r"got mixed torch\.Tensor and DTensor"),
        "An operator gets a DTensor together with a tensor that is not distributed",
        "of an optimizer: foreach=False (PyTorch uses foreach by itself), or distribute the other "
        "parameters, too (fully_shard of the whole model, Replicate() for the rest); elsewhere "
        "distribute_tensor(x, mesh, [Replicate()])",
    ),
    # aten/src/ATen/Context.cpp; a loss of one value a sample (nll_loss) has a deterministic form
    KnownError(
        "not_deterministic",
        re.compile(r"nll_loss2d\w* does not have a deterministic implementation"),
        "A loss over images or sequences (cross_entropy or nll_loss of more than two dimensions) "
        "has no deterministic form, and use_deterministic_algorithms(True) wants one",
        "give the loss one row a pixel or token: logits.movedim(1, -1).flatten(0, -2) with "
        "target.flatten(); else torch.use_deterministic_algorithms(True, warn_only=True)",
    ),
    KnownError(
        "not_deterministic",
        re.compile(r"Deterministic behavior was enabled with"),
        "cuBLAS is deterministic with a fixed workspace only, and "
        "use_deterministic_algorithms(True) wants that",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, before the first matmul",
    ),
    KnownError(
        "not_deterministic",
        re.compile(r"does not have a deterministic implementation"),
        "An operator has no deterministic form, and use_deterministic_algorithms(True) wants one",
        "torch.use_deterministic_algorithms(True, warn_only=True); or another operator at this "
        "line (PyTorch lists those without a deterministic form at use_deterministic_algorithms)",
    ),
    # aten/src/ATen/native/TensorShape.cpp
    KnownError(
        "nothing_to_join",
        re.compile(r"stack expects a non-empty TensorList|expected a non-empty list of Tensors"),
        "torch.stack or torch.cat gets an empty list",
        "look at what fills the list: a loop without a batch (drop_last=True with fewer samples "
        "than one batch), a branch or a hook that never appended",
    ),
    KnownError(
        "numbers_joined",
        re.compile(r"zero-dimensional tensor \(at position \d+\) cannot be concatenated"),
        "torch.cat gets single numbers",
        "torch.stack(losses), which makes a dimension for them",
    ),
    KnownError(
        "expand_size",
        re.compile(
            r"The expanded size of the tensor \(\d+\) must match the existing size"
            r"|shape mismatch: value tensor of shape \["
        ),
        "A tensor is put in a place of another size",
        "look at both shapes at this line: x[…] = y wants y in the shape of x[…]; expand() "
        "enlarges dimensions of size 1 only (unsqueeze first); tokens beyond a model's positions "
        "(truncation=True, max_length=…)",
    ),
    # aten/src/ATen/native/LinearAlgebra.cpp, Linear.cpp
    KnownError(
        "matmul_dimensions",
        re.compile(r"mat2 must be a matrix|batch[12] must be a 3D tensor|1D tensors expected, but"),
        "A matmul gets tensors of another number of dimensions",
        "torch.matmul (@) multiplies vectors, matrices and batches of them; torch.mm is for "
        "matrices, torch.bmm for tensors with three dimensions",
    ),
    KnownError(
        "matmul_sizes",
        re.compile(r"Expected size for first two dimensions of batch2 tensor to be"),
        "Two batches of matrices do not fit each other",
        "(batch, n, k) times (batch, k, m): keys.transpose(1, 2) in attention",
    ),
    KnownError(
        "einsum_letters",
        re.compile(r"einsum\(\): "),
        "The letters of einsum do not fit its tensors",
        "one letter for each dimension, the same one for the same size, and those of the result in "
        "one of the inputs",
    ),
    KnownError(
        "not_invertible",
        re.compile(
            r"input is not positive-definite|the input matrix is singular"
            r"|algorithm failed to converge because the input matrix"
        ),
        "A matrix cannot be factorized: it is singular, not positive, or has NaN",
        "add 1e-6 * torch.eye(n, device=x.device), compute in float64; look for NaN before it",
    ),
    # aten/src/ATen/native/Sorting.cpp, TensorAdvancedIndexing.cpp
    KnownError(
        "topk_range",
        re.compile(r"selected (?:index|number) k out of range"),
        "topk asks for more than there are",
        "k = min(k, x.size(-1)): a model with fewer classes, a batch with fewer samples",
    ),
    KnownError(
        "index_shape",
        re.compile(
            r"Index tensor must have the same number of dimensions as"
            r"|Expected index \[[\d, ]*\] to be (?:no larger|smaller) than"
        ),
        "gather or scatter gets an index of another shape than its tensor",
        "an index with as many dimensions: q.gather(1, actions.unsqueeze(1)).squeeze(1)",
    ),
    KnownError(
        "mask_shape",
        re.compile(r"The shape of the mask \[[\d, ]*\] at index \d+ does not match"),
        "A mask has another shape than the tensor that it is for",
        "make the mask of this tensor, with the same slices and the same padding",
    ),
    # c10/util/Exception.h, aten/src/ATen/native/Fill.cpp
    KnownError(
        "half_overflow",
        re.compile(r"value cannot be converted to type (?:at|c10)::(?:Half|BFloat16) without"),
        "A number is beyond float16's largest, 65504",
        'float("-inf") or torch.finfo(x.dtype).min in place of -1e9 in a mask',
    ),
    # aten/src/ATen/native/Distributions.cpp, torch/distributions/distribution.py
    KnownError(
        "no_distribution",
        re.compile(
            r"probability tensor contains either `?inf`?, `?nan`? or element < 0"
            r"|Expected parameter \w+ \([\s\S]*to satisfy the constraint"
        ),
        "A distribution is to be made of NaN, infinite or negative numbers",
        "find the first NaN (torch.autograd.set_detect_anomaly(True) for a while): a learning rate "
        "too high, log or division at 0, exp that overflows; logits= in place of probs=, "
        "scale=F.softplus(x) + 1e-5",
    ),
    # aten/src/ATen/native/LossNLL.cpp
    KnownError(
        "class_weights",
        re.compile(
            r"weight tensor should be defined either for all|cannot assign '[^']+' object to buffer"
        ),
        "A loss gets weights of its classes in another form than it wants",
        "weight=torch.tensor([…], dtype=torch.float, device=device), one number for each output of "
        "the last layer",
    ),
    # torch/nn/functional.py, torch/nn/modules/activation.py
    KnownError(
        "attention_mask",
        re.compile(
            r"The shape of the [23]D attn_mask is|Expected key_padd\w+_mask\.shape"
            r"|key_padding_mask should be"
        ),
        "Attention gets a mask of another shape than it wants",
        "attn_mask as (length, length) for all samples, or (batch × heads, length, length): "
        "mask.repeat_interleave(heads, dim=0); padding as key_padding_mask=(batch, length), True "
        "where it is",
    ),
    KnownError(
        "heads",
        re.compile(
            r"(?:embed_dim|hidden_size|d_model|dim) must be divisible by (?:the )?num"
            r"|hidden size \(\d+\) is not a multiple of the number of attention"
        ),
        "The model's width is no multiple of the number of its heads",
        "a number of heads that divides the width (100: 4, 5 or 10), or another width",
    ),
    KnownError(
        "channels_divisible",
        re.compile(
            r"must be divisible by (?:num_)?groups"
            r"|'channel' dimension to be divisible by the square"
        ),
        "The number of channels is no multiple of what it is split into",
        "groups that divide the channels (8 of 48, not 32); PixelShuffle wants upscale_factor² "
        "times the channels that it gives",
    ),
    KnownError(
        "normalized_size",
        re.compile(r"Given normalized_shape=\[|running_mean should contain \d+ elements not \d+"),
        "A normalization is made for another number of features than it gets",
        "BatchNorm2d(channels of its input), which are dimension 1; LayerNorm(size of the last "
        "dimension), or x.permute(…) before it",
    ),
    # torch/nn/modules/rnn.py
    KnownError(
        "recurrent_input",
        re.compile(
            r"input\.size\(-1\) must be equal to input_size"
            r"|For (?:un)?batched [23]-D input, hx"
        ),
        "A recurrent layer gets an input or a hidden state of another shape",
        "input_size as wide as the last dimension; the hidden state as (layers × directions, "
        "batch, hidden), with batch_first=True, too",
    ),
    # aten/src/ATen/native/BinaryOps.h
    KnownError(
        "bool_arithmetic",
        re.compile(r"with (?:two )?(?:a )?bool tensors? is not supported"),
        "Truth values are subtracted",
        "~mask in place of 1 - mask; mask.float() to compute with it",
    ),
    # torch/csrc/autograd/python_variable.cpp
    KnownError(
        "flag_of_result",
        re.compile(r"you can only change requires_grad flags of leaf variables"),
        "requires_grad is set on a tensor that was computed",
        "x.detach() for a tensor without a graph; to freeze, set it on parameters: "
        "module.requires_grad_(False)",
    ),
    # aten/src/ATen/native/PackedSequence.cpp
    KnownError(
        "lengths_unsorted",
        re.compile(r"`lengths` array must be sorted in decreasing order when `enforce_sorted`"),
        "pack_padded_sequence wants the longest sequence of a batch first",
        "pack_padded_sequence(x, lengths, enforce_sorted=False), which sorts them, and gives "
        "outputs and states in the batch's order",
    ),
    KnownError(
        "length_of_none",
        re.compile(r"Length of all samples has to be greater than 0"),
        "A sequence of the batch has no steps: its length is 0",
        "leave empty samples (an empty text) out of the data set, or give them one step: "
        "lengths.clamp(min=1)",
    ),
    # aten/src/ATen/native/Scalar.cpp, torch/csrc/utils/python_scalars.h
    KnownError(
        "one_number_wanted",
        re.compile(
            r"a Tensor with \d+ elements cannot be converted to Scalar"
            r"|only one element tensors can be converted to Python scalars"
        ),
        "One number is asked of a tensor that has several",
        "x.mean().item() of losses of single samples (reduction='none', several GPUs); x.tolist() "
        "for all of them; torch.stack(tensors) in place of torch.tensor(tensors)",
    ),
    # aten/src/ATen/MemoryOverlap.cpp
    KnownError(
        "expanded_written",
        re.compile(r"the written-to tensor refers? to a single memory location"),
        "A tensor is written into whose numbers are one and the same memory (expand())",
        "x = x.expand(…).clone() before it is changed in place, or x.repeat(…)",
    ),
    # torch/csrc/utils/tensor_new.cpp
    KnownError(
        "text_as_numbers",
        re.compile(r"too many dimensions 'str'|new\(\): invalid data type 'str'"),
        "A tensor is to be made of text",
        "number the classes ({name: i for i, name in enumerate(sorted(names))}); text through a "
        "tokenizer",
    ),
)
#: The sizes of a loss's weights, which it multiplies its terms by; a gradient that is None.
_WEIGHTS_OF_LOSS: Final = "sizes_of_weights"
_BINARY: Final = re.compile(r"\bbinary_cross_entropy\w*\(")
#: Whole numbers as weights of classes (data_ptr in ATen/native/cuda/Loss.cu).
_WHOLE_WEIGHTS: Final = re.compile(
    r"expected scalar type (?:Float|Half|Double) but found (?:Long|Int)"
)
_OF_CLASSES: Final = re.compile(r"cross_entropy\(|nll_loss\(")
#: Of predictions and labels.
_COMPARED: Final = re.compile(r"==|\.eq\(")
#: Their kinds.
KINDS: Final = (
    *dict.fromkeys(error.kind for error in _KNOWN),
    _WEIGHTS_OF_LOSS,
)


def known(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What an operator that refuses its tensors means."""
    met = first_met(_KNOWN, raised.message)
    if met is not None and met[0].kind == "sizes_differ" and _in_binary_loss(raised):
        return failure_finding(
            _WEIGHTS_OF_LOSS,
            "The weights of the loss (pos_weight, weight) do not fit its output",
            "",
            "pos_weight has one number for each output of a sample: torch.tensor([4.0]) of a yes "
            "or no, as many as labels of several; negatives / positives is usual, and two classes "
            "need no two (that is cross_entropy's weight)",
        )
    if met is not None and met[0].kind == "sizes_differ" and _COMPARED.search(raised.code):
        return failure_finding(
            met[0].kind,
            "Predictions and labels that are compared differ in number",
            "",
            "output.argmax(dim=1), or torch.max(output, 1)[1]: the classes are in dimension 1, the "
            "samples in dimension 0; each batch with its own labels",
        )
    if met is None and _WHOLE_WEIGHTS.search(raised.message) and _in_class_loss(raised):
        met = next((error, "") for error in _KNOWN if error.kind == "class_weights")
    return met and failure_finding(met[0].kind, met[0].title, "", met[0].fix)


def _in_class_loss(raised: ParsedException) -> bool:
    return any(_OF_CLASSES.search(frame.code) for frame in raised.frames)


def _in_binary_loss(raised: ParsedException) -> bool:
    """Does the loss fail itself? It has compared its input with the targets by then."""
    last = raised.frames[-1] if raised.frames else None
    if last is None or last.package != "torch":
        return False
    return _BINARY.search(f"{last.function}(") is not None or _BINARY.search(last.code) is not None
