"""`digits-cnn` without evaluations, for benchmarks that measure only training."""

import msgspec

from workloads.applications import digits_cnn

SPEC = msgspec.structs.replace(digits_cnn.SPEC, name="digits-cnn-unevaluated", evaluate_every=1e12)
build = digits_cnn.build
