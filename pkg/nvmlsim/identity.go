package nvmlsim

import (
	"encoding/binary"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

// namespace of the UUIDs made here (RFC 9562, version 5).
var namespace = uuid.MustParse("8d5f8a0e-6d34-4d0e-9a5e-4f1d8b6c2a77")

// gpuUUID is the identity of a GPU for ever: it follows from the node's name
// and the GPU's index.
func gpuUUID(nodeName string, index int) string {
	return "GPU-" + uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/gpu/%d", nodeName, index)).String()
}

// Identity is equal for two handles of the same object, and can be a key. GPUs and event sets have one handle each; those of
// MIG devices and instances are made by each call that returns them.
func Identity(handle any) any {
	switch h := handle.(type) {
	case *migDevice:
		return *h
	case *gpuInstance:
		return *h
	case *computeInstance:
		return [2]any{*h.parent, computeInstance{id: h.id, number: h.number}}
	}
	return handle
}

// boardSerial is the 13-digit serial number of a board.
func boardSerial(nodeName string, board int) string {
	id := uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/board/%d", nodeName, board))
	return fmt.Sprintf("165%010d", binary.BigEndian.Uint64(id[:8])%1e10)
}

// board answers what a GPU's board says of itself, and what only MIG devices are asked.
type board struct {
	unsupportedDevice

	gpu *device
}

// Recorded GPUs have a firmware of the driver's version, one GPU a board, and neither a fan nor a display.

func (b *board) GetVbiosVersion() (string, nvml.Return) {
	return answerIf(b.gpu, b.gpu.model.VBIOSVersion != "", b.gpu.model.VBIOSVersion)
}

func (b *board) GetBoardPartNumber() (string, nvml.Return) {
	return answerIf(b.gpu, b.gpu.model.BoardPartNumber != "", b.gpu.model.BoardPartNumber)
}

func (b *board) GetGspFirmwareVersion() (string, nvml.Return) {
	return answer(b.gpu, b.gpu.lib.machine.DriverVersion())
}

func (b *board) GetMultiGpuBoard() (int, nvml.Return) { return answer(b.gpu, 0) }
func (b *board) GetNumFans() (int, nvml.Return)       { return answer(b.gpu, 0) }

func (b *board) GetDisplayActive() (nvml.EnableState, nvml.Return) {
	return answer[nvml.EnableState](b.gpu, nvml.FEATURE_DISABLED)
}

// GetPcieLinkMaxSpeed is the card's ("the device's", nvml.h), in words of nvml.h that count as generations do.
func (b *board) GetPcieLinkMaxSpeed() (uint32, nvml.Return) {
	generation, ret := b.gpu.GetGpuMaxPcieLinkGeneration()
	return uint32(generation), ret
}

// What only MIG devices have is a wrong argument on a real H100. GPUs without MIG do not support it (assumed).

func (b *board) GetGpuInstanceId() (int, nvml.Return)     { return 0, b.isNoPart() }
func (b *board) GetComputeInstanceId() (int, nvml.Return) { return 0, b.isNoPart() }

func (b *board) GetDeviceHandleFromMigDeviceHandle() (nvml.Device, nvml.Return) {
	return unsupportedDevice{}, b.isNoPart()
}

func (b *board) isNoPart() nvml.Return {
	if _, _, ret := b.gpu.partitionable(); ret != nvml.SUCCESS {
		return ret
	}
	return nvml.ERROR_INVALID_ARGUMENT
}
