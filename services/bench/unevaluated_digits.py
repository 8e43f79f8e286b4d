"""`digits-cnn` that is never evaluated: for benchmarks that measure the training alone."""

import msgspec

from workloads.applications import digits_cnn

SPEC = msgspec.structs.replace(digits_cnn.SPEC, name="digits-cnn-unevaluated", evaluate_every=1e12)
build = digits_cnn.build
