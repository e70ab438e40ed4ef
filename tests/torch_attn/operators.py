from typing import Any

from torch.library import opcheck


def check_operator(operator: Any, *arguments: Any) -> None:
    """Check an operator as torch wants; only shapes and what is written depend on its kernel."""
    opcheck(operator, (*arguments, "reference"))
    opcheck(operator, (*arguments, "triton"), test_utils=("test_schema", "test_faketensor"))
