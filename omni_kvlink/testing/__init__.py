"""The public conformance kit: hold a connector, a copier or an adapter to its contract."""

from .adapter_checks import check_adapter as check_adapter
from .conformance import CONNECTOR_CHECKS as CONNECTOR_CHECKS
from .conformance import check_connector as check_connector
from .copier_checks import COPIER_CHECKS as COPIER_CHECKS
from .copier_checks import check_copier as check_copier
from .failure import CheckFailed as CheckFailed
