// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

// device is one simulated GPU; the pointer is its NVML handle.
type device struct {
	board

	// Fixed at creation.
	lib    *Library
	index  int
	gpu    *GPU
	model  *Model
	uuid   string
	serial string
	path   pciPath
	links  []link
}

var _ nvml.Device = (*device)(nil)

// newDevice makes GPU index of a validated profile.
func newDevice(l *Library, index int) *device {
	gpu, model := &l.profile.GPUs[index], &l.profile.GPU
	path, err := parsePCIPath(gpu.PCI)
	if err != nil {
		panic("profile not validated: " + err.Error())
	}
	board := index
	if gpu.Board != nil {
		board = *gpu.Board
	}
	d := &device{
		lib: l, index: index, gpu: gpu, model: model,
		uuid:   gpuUUID(l.nodeName, index),
		serial: boardSerial(l.nodeName, board),
		path:   path,
		links:  makeLinks(l.profile, index),
	}
	d.board.gpu, d.on = d, d
	return d
}

func migEnabled(gpu *GPU, model *Model) bool {
	switch {
	case model.MIG == nil:
		return false
	case gpu.MIGEnabled != nil:
		return *gpu.MIGEnabled
	}
	return model.MIG.Enabled
}

// handle is the device, unless it is gone. It does not wait for a GPU that hangs.
func (d *device) handle() (nvml.Device, nvml.Return) {
	now, ret := d.lib.now()
	if ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	if now.GPUs[d.index].gone() {
		return unsupportedDevice{}, nvml.ERROR_GPU_IS_LOST
	}
	return d, nvml.SUCCESS
}

// state waits as long as the GPU hangs, as every call that asks the GPU does.
func (d *device) state() (*GPUState, nvml.Return) {
	for {
		now, ret := d.lib.now()
		if ret != nvml.SUCCESS {
			return nil, ret
		}
		g := &now.GPUs[d.index]
		switch {
		case g.gone():
			return nil, nvml.ERROR_GPU_IS_LOST
		case !g.Hung:
			time.Sleep(time.Duration(g.Slow) * time.Millisecond)
			return g, nvml.SUCCESS
		}
		d.lib.machine.await(now.changed)
	}
}

// ready is state without the state.
func (d *device) ready() nvml.Return {
	_, ret := d.state()
	return ret
}

// answer is the value, if the GPU answers.
func answer[T any](d *device, value T) (T, nvml.Return) {
	return read(d, func(*GPUState) T { return value })
}

// answerIf is answer for what only some GPUs support.
func answerIf[T any](d *device, supported bool, value T) (T, nvml.Return) {
	value, ret := answer(d, value)
	if ret == nvml.SUCCESS && !supported {
		var none T
		return none, nvml.ERROR_NOT_SUPPORTED
	}
	return value, ret
}

// read is answer for what changes.
func read[T any](d *device, value func(*GPUState) T) (T, nvml.Return) {
	g, ret := d.state()
	if ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return value(g), nvml.SUCCESS
}

// change is a call that changes the machine, in one step.
func (d *device) change(f func(*State, *GPUState) nvml.Return) nvml.Return {
	for {
		if ret := d.ready(); ret != nvml.SUCCESS {
			return ret
		}
		var ret nvml.Return
		hung := false
		err := d.lib.machine.update(func(s *State) error {
			switch g := &s.GPUs[d.index]; {
			case g.Hung:
				hung = true
			case g.gone():
				ret = nvml.ERROR_GPU_IS_LOST
			default:
				if ret = f(s, g); ret == nvml.SUCCESS {
					return nil
				}
			}
			return errUnchanged
		})
		switch {
		case hung:
			continue
		case err != nil && ret == nvml.SUCCESS:
			return nvml.ERROR_OPERATING_SYSTEM
		}
		return ret
	}
}

// Identity.

func (d *device) GetIndex() (int, nvml.Return)       { return answer(d, d.lib.indexOf(d)) }
func (d *device) GetName() (string, nvml.Return)     { return answer(d, d.model.ProductName) }
func (d *device) GetUUID() (string, nvml.Return)     { return answer(d, d.uuid) }
func (d *device) GetSerial() (string, nvml.Return)   { return answer(d, d.serial) }
func (d *device) GetMinorNumber() (int, nvml.Return) { return answer(d, d.lib.profile.minor(d.index)) }

// GetBoardId has the device's number as it is, not shifted: a recorded T4 at 00:1e.0 has 0x1e.
func (d *device) GetBoardId() (uint32, nvml.Return) {
	a := d.path.address
	return answer(d, a.domain<<16|a.bus<<8|a.device)
}

func (d *device) GetBrand() (nvml.BrandType, nvml.Return) {
	return answer(d, brands[d.model.Brand])
}

func (d *device) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	return answer(d, architectures[d.model.Architecture])
}

func (d *device) GetCudaComputeCapability() (int, int, nvml.Return) {
	major, minor := splitVersion(d.model.CUDAComputeCapability)
	_, ret := answer(d, 0)
	if ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return major, minor, ret
}

func (d *device) GetNumGpuCores() (int, nvml.Return) { return answer(d, d.model.CUDACores) }

func (d *device) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	mode, ok := addressingModes[d.model.AddressingMode]
	return answerIf(d, ok, nvml.DeviceAddressingMode{Value: uint32(mode)})
}

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
	loadedDevice

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
