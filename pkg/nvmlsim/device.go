package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// device is one simulated GPU; the pointer is its NVML handle.
type device struct {
	unsupportedDevice

	lib   *Library
	index int
}

var _ nvml.Device = (*device)(nil)

func newDevice(l *Library, index int) *device {
	return &device{lib: l, index: index}
}
