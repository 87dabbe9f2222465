"""The built-in workloads, all on real data that is already on the machine."""

from collections.abc import Callable

from workup.workload import Workload
from workup.workloads import digits, tabular, text

#: Name → a function that builds the workload; nothing is read before it is called.
BUILT_IN: dict[str, Callable[[], Workload]] = {
    "digits-mlp": digits.digits_mlp,
    "digits-resnet": digits.digits_resnet,
    "digits-resnet-stride": digits.digits_resnet_stride,
    "text-transformer": text.text_transformer,
    "text-transformer-postnorm": text.text_transformer_postnorm,
    "diabetes-regression": tabular.diabetes_regression,
    "breast-cancer-imbalanced": tabular.breast_cancer_imbalanced,
    "residual-unnormalised": digits.residual_unnormalised,
    "relu-mlp-large-init": digits.relu_mlp_large_init,
    "post-norm-mlp": digits.post_norm_mlp,
    "pre-norm-mlp": digits.pre_norm_mlp,
}
