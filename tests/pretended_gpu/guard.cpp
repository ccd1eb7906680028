// Lets tensors say that they lie on a GPU where PyTorch was built without: its guards of the current device do nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
