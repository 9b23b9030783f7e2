"""The kernels that a simulated run would have launched on its GPU, with their work.

One row is one kernel, or several of the same kind that an operator launches one after another.
Columns are whole numbers, so that two batch sizes give every other one (they are affine in it).
"""

from __future__ import annotations

from typing import Final

#: What a kernel does, in the order of the codes of ``Recording.kernel_kind``.
#: "matmul": matrix multiplications. "convolution…": as implicit matmuls, by cuDNN;
#: "convolution_3x3…": by filters that Winograd's algorithm is for, in steps of 1 and planes apart;
#: "grouped…": convolutions in several groups, "grouped_nhwc…" of channels-last tensors;
#: "depthwise…": one filter a channel, by PyTorch's own kernels; "depthwise_nhwc…" by cuDNN's for
#: channels-last tensors. "attention…": fused scaled dot product attention.
#: "pointwise": elementwise, over operands of one layout; "pointwise_reordered": over some whose
#: neighbours in memory are others; "layout": cuDNN's copies into the order of its convolutions;
#: "batch_norm…": in training ("batch_norm_nhwc…" of channels-last tensors) and "batch_norm_eval";
#: "normalization…": of layers and groups; "indexing": look-ups and scatters; "optimizer": over
#: lists of parameters; "upload", "upload_pinned", "download": between host and device; "wait": no
#: kernel, the host waits here until the GPU has done everything, "stream_wait": until the row's
#: stream has; "event": number ``rows`` is recorded; "event_wait": the row's stream goes on after
#: event ``rows`` of stream ``columns``; "event_synchronize": the host does, after one of the row's;
#: "graph": the ``rows`` rows that follow are launched together, by one launch (a CUDA graph's).
KINDS: Final = (
    "matmul",
    "convolution",
    "convolution_input_gradient",
    "convolution_weight_gradient",
    "grouped",
    "grouped_input_gradient",
    "grouped_weight_gradient",
    "grouped_nhwc",
    "grouped_nhwc_input_gradient",
    "grouped_nhwc_weight_gradient",
    "depthwise",
    "depthwise_input_gradient",
    "depthwise_weight_gradient",
    "depthwise_nhwc",
    "depthwise_nhwc_input_gradient",
    "depthwise_nhwc_weight_gradient",
    "attention",
    "attention_gradient",
    "recurrent",
    "pointwise",
    "layout",
    "reduction",
    "normalization",
    "normalization_gradient",
    "softmax",
    "pooling",
    "pooling_gradient",
    "resampling",
    "indexing",
    "sorting",
    "fill",
    "optimizer",
    "upload",
    "upload_pinned",
    "download",
    "wait",
    "pointwise_reordered",
    "concatenation",
    "batch_norm",
    "batch_norm_gradient",
    "batch_norm_nhwc",
    "batch_norm_nhwc_gradient",
    "batch_norm_eval",
    "stream_wait",
    "event",
    "event_wait",
    "event_synchronize",
    "convolution_3x3",
    "convolution_3x3_input_gradient",
    "graph",
)

#: Rows of these kinds are no kernels.
MARKS: Final = ("wait", "stream_wait", "event", "event_wait", "event_synchronize", "graph")

#: In which numbers a kernel computes, in the order of the codes of ``Recording.kernel_dtype``.
DTYPES: Final = ("float32", "tfloat32", "float16", "bfloat16", "float64", "float8", "integer")

#: Kernels that the CPU can be ahead of the GPU: CUDA's launch queue holds 1,024, and a further
#: launch waits. (Not documented; what is seen where launches are timed.)
LAUNCH_QUEUE: Final = 1024
