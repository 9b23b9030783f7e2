"""Exceptions of gradients: of tensors that get none, of functions with a backward of their own, of
sparse gradients, of backward passes that cuDNN does not make.

The address next to a text is where PyTorch raises it.
"""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

_KNOWN: Final = (
    # Python, of a number
    KnownError(
        "loss_is_number",
        re.compile(
            r"'(?:float|int|numpy\.float(?:32|64)|ndarray)' object has no attribute 'backward'"
        ),
        "The loss is a number, without a graph: .item(), float() or NumPy made it one",
        "add up and return the losses as tensors (loss = l1 + 10 * kl), call backward() of that, "
        "and .item() only for what is printed or logged",
    ),
    # torch/optim/optimizer.py
    KnownError(
        "optimizer_of_results",
        re.compile(r"can't optimize a non-leaf Tensor"),
        "The optimizer is given a computed tensor: .to(device), .cuda() and operators give results",
        "make it where it is used, torch.randn(…, device=device, requires_grad=True), or "
        "nn.Parameter(x.to(device)), not nn.Parameter(x).to(device), which is a copy",
    ),
    # torch/csrc/autograd/python_function.cpp (THPFunction), custom_function.cpp, engine.cpp
    KnownError(
        "custom_backward",
        re.compile(
            r"returned an (?:incorrect number of gradients|invalid gradient at index)"
            r"|returned a gradient different than None at position \d+"
        ),
        "backward() of a Function of your own does not give one gradient for each input",
        "as many results as forward() has inputs after ctx, in their order (None for what is no "
        "tensor or needs no gradient), each in its input's shape",
    ),
    KnownError(
        "custom_backward",
        re.compile(r"[Yy]ou must implement (?:either )?the (?:backward|'?backward)"),
        "A Function of your own has no backward()",
        "@staticmethod def backward(ctx, gradient) next to forward, spelled so and indented as it",
    ),
    # torch/nn/modules/module.py (_maybe_non_full_backward_hook, BackwardHook), by way of
    # torch/csrc/autograd/variable.cpp
    KnownError(
        "hook_on_in_place",
        re.compile(r"of BackwardHookFunction\w* is a view and is being modified inplace"),
        "The layer behind one with a backward hook changes its input in place",
        "inplace=False of the activation after it (nn.ReLU(inplace=True), x += y); or a hook of "
        "the tensor: output.register_hook(…) in a forward hook",
    ),
    # torch/optim/adam.py, adamw.py, rmsprop.py, …
    KnownError(
        "sparse_gradients",
        re.compile(
            r"does not support sparse gradients"
            r"|SparseAdam does not support dense gradients"
            r"|weight_decay option is not compatible with sparse gradients"
            r"|add\(sparse, dense\) is not supported"
        ),
        "An embedding with sparse=True has sparse gradients, which not each optimizer or option "
        "bears",
        "two optimizers: SparseAdam(embedding.parameters()), and the other for the rest (SGD and "
        "Adagrad bear both, without weight_decay); or leave sparse=True out",
    ),
    # torch/nn/utils/clip_grad.py, aten/src/ATen/native/native_functions.yaml
    KnownError(
        "sparse_gradients",
        re.compile(
            r"Could not run 'aten::(?:linalg_vector_norm|_foreach_\w+|norm)\S*' with arguments "
            r"from the 'Sparse"
        ),
        "Gradients are clipped by their norm, and those of an embedding with sparse=True have none",
        "clip the dense parameters alone: [p for p in model.parameters() if p is not "
        "embedding.weight]; or leave sparse=True out",
    ),
    # aten/src/ATen/native/PointwiseOps.cpp; torch/optim/swa_utils.py (get_swa_multi_avg_fn)
    KnownError(
        "averaged_counters",
        re.compile(r"Integer division with addcdiv is no longer supported"),
        "AveragedModel(use_buffers=True) averages a counter of whole numbers (num_batches_tracked "
        "of BatchNorm), which its average of all steps cannot on a GPU",
        "AveragedModel(model) without use_buffers, and torch.optim.swa_utils.update_bn(loader, "
        "averaged) at the end; or an exponential average: "
        "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)",
    ),
    # aten/src/ATen/native/cudnn/RNN.cpp
    KnownError(
        "recurrent_evaluated",
        re.compile(r"cudnn RNN backward can only be called in training mode"),
        "A backward pass goes through a recurrent layer in evaluation mode, for which cuDNN keeps "
        "nothing",
        "lstm.train() (dropout and BatchNorm of the rest may stay in evaluation mode), or with "
        "torch.backends.cudnn.flags(enabled=False): around that forward pass",
    ),
    # tools/autograd/derivatives.yaml (_cudnn_rnn_backward)
    KnownError(
        "recurrent_twice",
        re.compile(r"derivative for '_cudnn_rnn_backward' is not implemented"),
        "A second derivative goes through a recurrent layer, which cuDNN does not compute (a "
        "gradient penalty, a Hessian, MAML)",
        "with torch.backends.cudnn.flags(enabled=False): around the forward pass of the layer",
    ),
    # tools/autograd/derivatives.yaml
    KnownError(
        "second_derivative",
        re.compile(
            r"[Dd]erivative for (?:'|aten::)\S*(?:attention|_backward)\S* is not implemented"
        ),
        "A second derivative goes through an operator that has none (a gradient penalty, a "
        "Hessian, MAML)",
        "of attention: with sdpa_kernel(SDPBackend.MATH): around the forward pass; elsewhere the "
        "same by other operators",
    ),
)
#: What is None where its gradient is used, in Python's words.
_OF_NONE: Final = re.compile(
    r"'NoneType' object has no attribute|unsupported operand type\(s\).*'NoneType'"
    r"|must be (?:a )?Tensor, not NoneType|bad operand type for unary \S+ 'NoneType'"
)
_GRADIENT: Final = re.compile(r"\.grad\b(?!_)")
#: PyTorch's warning of a gradient that is asked of a result (aten/src/ATen/core/TensorBody.h).
_OF_RESULT: Final = "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"
_NONE_YET: Final = "gradient_none"
_NONE_OF_RESULT: Final = "gradient_of_result"
#: Their kinds.
KINDS: Final = (*dict.fromkeys(error.kind for error in _KNOWN), _NONE_YET, _NONE_OF_RESULT)


def known(raised: ParsedException, seen: FailureContext) -> Finding | None:
    """What an error about gradients means."""
    if _OF_NONE.search(raised.message) and _GRADIENT.search(raised.code):
        return _of_result() if _OF_RESULT in seen.output else _none_yet()
    met = first_met(_KNOWN, raised.message)
    return met and failure_finding(met[0].kind, met[0].title, "", met[0].fix)


def _none_yet() -> Finding:
    return failure_finding(
        _NONE_YET,
        "A parameter's .grad is None where the line uses it: no backward pass has given it one",
        "",
        "if p.grad is not None: around it (frozen and unused parameters have none), after "
        "backward(); torch.nn.utils.clip_grad_value_ and clip_grad_norm_ leave those out",
    )


def _of_result() -> Finding:
    return failure_finding(
        _NONE_OF_RESULT,
        "The line uses the .grad of a computed tensor, which is None: backward() gives gradients "
        "to the tensors that results are computed of",
        "",
        "torch.randn(…, device=device, requires_grad=True) in place of "
        "torch.randn(…, requires_grad=True).cuda(); with torch.no_grad(): w -= lr * w.grad in "
        "place of w = w - lr * w.grad; x.retain_grad() for the gradient of a result",
    )
