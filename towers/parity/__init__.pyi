from .check import check_parity as check_parity
from .report import Parity as Parity
from .report import Row as Row
