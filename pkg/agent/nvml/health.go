// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"encoding/binary"
	"errors"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Condition is the part of Device that health needs.
type Condition interface {
	// Readings asks for all at once. What the GPU or the driver lacks is nil, and
	// so is a single reading that failed; an error means that the GPU did not
	// answer, ErrGPULost for one.
	Readings() (Readings, error)
	// Watch reports the GPU's events from now on. It is for one GPU, so that one
	// that hangs or is lost keeps nobody else's events back.
	Watch() (Watch, error)
}

// Readings of a GPU's condition.
type Readings struct {
	TemperatureC *uint32
	// SlowdownC is the temperature at which the GPU slows down. GPUs from Hopper
	// on have none; they say how far they are from the nearest threshold, and at
	// which distance they slow down.
	SlowdownC                *uint32
	MarginC, SlowdownMarginC *int32
	PowerMilliwatts          *uint32
	PCIe                     *PCIeLink
	// Throttle is NVML's mask of clocksEventReasons.
	Throttle *uint64
	// ECC errors since the driver was loaded.
	ECC  *ECCErrors
	Rows *RemappedRows
	// RecoveryAction is what the driver says must be done: NVML's number, 0 for nothing.
	RecoveryAction *uint32
	// Odd says which readings are nil although they are not just lacked; nil for none.
	Odd error
}

// PCIeLink is the link now and at best. At best is what NVML says, and that is what the card has: in a slot or a virtual machine with fewer
// lanes a link of fewer is sound.
type PCIeLink struct {
	Generation, Width       int
	MaxGeneration, MaxWidth int
	// PortWidth is how many lanes the port above the GPU has; 0 where that is not known. NVML does not know it.
	PortWidth int
}

// ECCErrors are memory errors.
type ECCErrors struct{ Corrected, Uncorrected uint64 }

// RemappedRows of the memory.
type RemappedRows struct {
	Corrected, Uncorrected int
	// Pending: a row is replaced at the next reset. Failed: no spare was left.
	Pending, Failed bool
}

// Watch is an NVML event set for one GPU.
type Watch interface {
	// Wait blocks for at most that long. The error wraps ErrTimeout if nothing
	// happened, and ErrGPULost when the GPU is gone and all its events were returned.
	Wait(timeout time.Duration) (Event, error)
	// Close ends the watch and the call that waits. With a real library, which
	// cannot be woken, it may only be called between two Waits.
	Close() error
}

// Event of a GPU.
type Event struct {
	Kind EventKind
	// Data is the XID or the recovery action, by kind.
	Data uint64
	// Instance is nil for an event of the whole GPU.
	Instance *Instance
}

// Instance names a MIG device of a GPU.
type Instance struct {
	GPU uint32
	// Compute is AllCompute for what concerns the whole GPU instance.
	Compute uint32
}

// AllCompute stands for all compute instances of a GPU instance.
const AllCompute = noInstance

// EventKind is NVML's event type.
type EventKind string

// The kinds of events that a watch reports.
const (
	EventXID            EventKind = "XID"
	EventDoubleBitECC   EventKind = "DoubleBitECC"
	EventMIGConfig      EventKind = "MIGConfig"
	EventRecoveryAction EventKind = "RecoveryAction"
	EventOther          EventKind = "Other"
)

// eventKinds are what a watch asks for. Changes of clocks are not among them: an H100 that computes raised 40 a second, and an
// XID came up to eight seconds behind them. That a GPU slows down is in its readings. Nor are corrected memory errors, which
// say nothing about whether the GPU works.
var eventKinds = map[uint64]EventKind{
	gonvml.EventTypeXidCriticalError:  EventXID,
	gonvml.EventTypeDoubleBitEccError: EventDoubleBitECC,
	gonvml.EventMigConfigChange:       EventMIGConfig,
	gonvml.EventTypeGpuRecoveryAction: EventRecoveryAction,
}

// noInstance is how NVML says that there is no MIG instance.
const noInstance = 0xFFFFFFFF

func (d *device) Readings() (Readings, error) {
	var r Readings
	var heard outcomes
	keep := heard.keep
	read(&r.TemperatureC, keep)(get(d.lib, "nvmlDeviceGetTemperature", func() (uint32, gonvml.Return) {
		return d.nvml.GetTemperature(gonvml.TEMPERATURE_GPU)
	}))
	read(&r.SlowdownC, keep)(get(d.lib, "nvmlDeviceGetTemperatureThreshold", func() (uint32, gonvml.Return) {
		return d.nvml.GetTemperatureThreshold(gonvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
	}))
	read(&r.MarginC, keep)(get(d.lib, "nvmlDeviceGetMarginTemperature", func() (int32, gonvml.Return) {
		margin, ret := d.nvml.GetMarginTemperature()
		return margin.MarginTemperature, ret
	}))
	read(&r.SlowdownMarginC, keep)(field[int32](d, gonvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT))
	read(&r.PowerMilliwatts, keep)(get(d.lib, "nvmlDeviceGetPowerUsage", d.nvml.GetPowerUsage))
	read(&r.Throttle, keep)(get(d.lib, "nvmlDeviceGetCurrentClocksEventReasons", d.nvml.GetCurrentClocksEventReasons))
	read(&r.PCIe, keep)(d.pcieLink())
	read(&r.ECC, keep)(d.eccErrors())
	read(&r.Rows, keep)(get(d.lib, "nvmlDeviceGetRemappedRows", func() (RemappedRows, gonvml.Return) {
		corrected, uncorrected, pending, failed, ret := d.nvml.GetRemappedRows()
		return RemappedRows{corrected, uncorrected, pending, failed}, ret
	}))
	read(&r.RecoveryAction, keep)(field[uint32](d, gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION))
	var err error
	r.Odd, err = heard.verdict()
	return r, err
}

// outcomes of several questions about a GPU.
type outcomes struct {
	answered              bool
	silent, doubtful, odd []error
}

// keep takes the outcome of one question.
func (o *outcomes) keep(err error) {
	switch {
	case err == nil:
		o.answered = true
	case lacks(err):
	case isDoubtful(err):
		o.doubtful = append(o.doubtful, err)
	case concernsGPU(err):
		o.silent = append(o.silent, err)
	default:
		o.odd = append(o.odd, err)
	}
}

// verdict says which questions were not answered although they could have been, and in err that the GPU does not answer.
func (o *outcomes) verdict() (odd, err error) {
	silent, all := o.silent, o.odd
	if len(o.doubtful) > 1 {
		silent = append(silent, o.doubtful...)
	} else {
		all = append(all, o.doubtful...) // one sensor, as long as others answer
	}
	odd = errors.Join(all...)
	if len(silent) == 0 && !o.answered {
		return odd, odd
	}
	return odd, errors.Join(silent...)
}

// isDoubtful tells whether an error is the GPU's if it is not the only one of its kind.
func isDoubtful(err error) bool {
	var failed *CallError
	return errors.As(err, &failed) && (failed.Return == gonvml.ERROR_TIMEOUT || failed.Return == gonvml.ERROR_UNKNOWN)
}

// concernsGPU tells whether an error is about the GPU or the driver as a whole.
// Any other is about the one question that was asked: each reading by itself can
// be done without, and a GPU that works must not be withdrawn because of one.
func concernsGPU(err error) bool {
	var failed *CallError
	if !errors.As(err, &failed) {
		return true
	}
	switch failed.Return {
	case gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_RESET_REQUIRED, gonvml.ERROR_IRQ_ISSUE,
		gonvml.ERROR_UNINITIALIZED, gonvml.ERROR_DRIVER_NOT_LOADED, gonvml.ERROR_LIB_RM_VERSION_MISMATCH, gonvml.ERROR_LIBRARY_NOT_FOUND:
		return true
	}
	return false
}

// read keeps an answer, if there was one.
func read[T any](into **T, keep func(error)) func(T, error) {
	return func(value T, err error) {
		keep(err)
		if err == nil {
			*into = &value
		}
	}
}

func (d *device) pcieLink() (link PCIeLink, err error) {
	for _, part := range []struct {
		into *int
		call string
		ask  func() (int, gonvml.Return)
	}{
		{&link.Generation, "nvmlDeviceGetCurrPcieLinkGeneration", d.nvml.GetCurrPcieLinkGeneration},
		{&link.Width, "nvmlDeviceGetCurrPcieLinkWidth", d.nvml.GetCurrPcieLinkWidth},
		{&link.MaxGeneration, "nvmlDeviceGetMaxPcieLinkGeneration", d.nvml.GetMaxPcieLinkGeneration},
		{&link.MaxWidth, "nvmlDeviceGetMaxPcieLinkWidth", d.nvml.GetMaxPcieLinkWidth},
	} {
		if *part.into, err = get(d.lib, part.call, part.ask); err != nil {
			return link, err
		}
	}
	return link, nil
}

func (d *device) eccErrors() (counts ECCErrors, err error) {
	count := func(kind gonvml.MemoryErrorType) (uint64, error) {
		return get(d.lib, "nvmlDeviceGetTotalEccErrors", func() (uint64, gonvml.Return) {
			return d.nvml.GetTotalEccErrors(kind, gonvml.VOLATILE_ECC)
		})
	}
	if counts.Corrected, err = count(gonvml.MEMORY_ERROR_TYPE_CORRECTED); err != nil {
		return counts, err
	}
	counts.Uncorrected, err = count(gonvml.MEMORY_ERROR_TYPE_UNCORRECTED)
	return counts, err
}

// field asks for a field of 32 bits. A driver that does not know it, as those before R565 do not know the recovery action, answers that the
// argument is not valid.
func field[T int32 | uint32](d *device, id uint32) (T, error) {
	value, err := fieldIn(&d.handle, id, 0)
	return T(binary.NativeEndian.Uint32(value[:])), err
}

// fieldIn asks for a field in a scope, such as a link, and returns what the driver has written there.
func fieldIn(d *handle, id, scope uint32) ([8]byte, error) {
	values := []gonvml.FieldValue{{FieldId: id, ScopeId: scope}}
	err := ask(d.lib, "nvmlDeviceGetFieldValues", func() gonvml.Return {
		if ret := d.nvml.GetFieldValues(values); ret != gonvml.SUCCESS {
			return ret
		}
		ret := gonvml.Return(int32(values[0].NvmlReturn))
		if ret == gonvml.ERROR_INVALID_ARGUMENT {
			ret = gonvml.ERROR_NOT_SUPPORTED
		}
		return ret
	})
	return values[0].Value, err
}

type watch struct {
	lib *library
	set gonvml.EventSet
}

func (d *device) Watch() (Watch, error) {
	supported, err := get(d.lib, "nvmlDeviceGetSupportedEventTypes", d.nvml.GetSupportedEventTypes)
	if err != nil {
		return nil, err
	}
	var types uint64
	for kind := range eventKinds {
		types |= kind & supported
	}
	if types == 0 {
		return nil, &CallError{Call: "nvmlDeviceRegisterEvents", Return: gonvml.ERROR_NOT_SUPPORTED}
	}
	set, err := get(d.lib, "nvmlEventSetCreate", d.lib.nvml.EventSetCreate)
	if err != nil {
		return nil, err
	}
	if set == nil {
		return nil, &CallError{Call: "nvmlEventSetCreate", Return: gonvml.ERROR_UNKNOWN}
	}
	w := &watch{lib: d.lib, set: set}
	err = ask(d.lib, "nvmlDeviceRegisterEvents", func() gonvml.Return { return d.nvml.RegisterEvents(types, set) })
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

func (w *watch) Wait(timeout time.Duration) (Event, error) {
	milliseconds := uint32(min(max(timeout.Milliseconds(), 0), 1<<31))
	data, err := get(w.lib, "nvmlEventSetWait", func() (gonvml.EventData, gonvml.Return) { return w.set.Wait(milliseconds) })
	if err != nil {
		return Event{}, err
	}
	event := Event{Kind: EventOther, Data: data.EventData}
	if kind, ok := eventKinds[data.EventType]; ok {
		event.Kind = kind
	}
	if data.GpuInstanceId != noInstance {
		event.Instance = &Instance{GPU: data.GpuInstanceId, Compute: data.ComputeInstanceId}
	}
	return event, nil
}

func (w *watch) Close() error { return ask(w.lib, "nvmlEventSetFree", w.set.Free) }
