"""The public conformance kit: hold a connector, a copier or an adapter to its contract."""

from omni_kvlink.testing.adapter_checks import check_adapter as check_adapter
from omni_kvlink.testing.conformance import CONNECTOR_CHECKS as CONNECTOR_CHECKS
from omni_kvlink.testing.conformance import check_connector as check_connector
from omni_kvlink.testing.copier_checks import COPIER_CHECKS as COPIER_CHECKS
from omni_kvlink.testing.copier_checks import check_copier as check_copier
from omni_kvlink.testing.rig import CheckFailed as CheckFailed
