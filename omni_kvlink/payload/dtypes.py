"""Re-exports for modules that do not import from `views` yet."""

from omni_kvlink.payload.views import byte_tensor as byte_tensor
from omni_kvlink.payload.views import dtype_name as dtype_name
from omni_kvlink.payload.views import tensor_view as tensor_view
from omni_kvlink.payload.views import tensor_views as tensor_views
