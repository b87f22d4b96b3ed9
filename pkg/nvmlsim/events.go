// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// simulatedEvents are those that happen here. Every GPU can report them.
const simulatedEvents = nvml.EventTypeSingleBitEccError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeXidCriticalError | nvml.EventTypeClock | nvml.EventMigConfigChange | nvml.EventTypeGpuRecoveryAction

// eventSet is the handle of an event set.
type eventSet struct {
	unsupportedEventSet

	lib   *Library
	over  <-chan struct{} // closed at the end of the session that the set was made in
	freed chan struct{}   // closed by Free

	mu    sync.Mutex
	wants []registration
	seen  uint64 // number of the last event that was returned or passed over
}

// registration is what a set wants to know about one GPU.
type registration struct {
	device *device
	types  uint64
	after  uint64 // number of the last event before the registration
}

var _ nvml.EventSet = (*eventSet)(nil)

// EventSetCreate returns an empty set. It ends with the session.
func (l *Library) EventSetCreate() (nvml.EventSet, nvml.Return) {
	now, ret := l.now()
	if ret != nvml.SUCCESS {
		return unsupportedEventSet{}, ret
	}
	return &eventSet{lib: l, over: now.over, freed: make(chan struct{})}, nvml.SUCCESS
}

func (d *device) GetSupportedEventTypes() (uint64, nvml.Return) {
	return answer(d, supportedEvents(d))
}

// supportedEvents: an H100 with driver 580.159.04 has all of nvml.h. Of other GPUs and older drivers it is not known: they have those that
// happen here.
func supportedEvents(d *device) uint64 {
	if d.model.Architecture == "Hopper" && branchOf(d.lib.machine.DriverVersion()) >= 580 {
		return nvml.EventTypeAll
	}
	return simulatedEvents
}

// RegisterEvents adds to the set what happens to the GPU from now on.
func (d *device) RegisterEvents(types uint64, set nvml.EventSet) nvml.Return {
	if ret := d.ready(); ret != nvml.SUCCESS {
		return ret
	}
	e, ok := set.(*eventSet)
	switch {
	case !ok || e == nil || e.lib != d.lib || closed(e.over) || closed(e.freed):
		return nvml.ERROR_INVALID_ARGUMENT
	case types&^supportedEvents(d) != 0:
		return nvml.ERROR_NOT_SUPPORTED
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.wants = append(e.wants, registration{d, types, d.lib.machine.State().LastEvent})
	return nvml.SUCCESS
}

// Wait returns the next event, ERROR_TIMEOUT after that many milliseconds,
// ERROR_INVALID_ARGUMENT once the set is freed, ERROR_UNINITIALIZED once its
// session is over, even if another one has begun, and ERROR_GPU_IS_LOST when all
// events are delivered and a GPU of the set is gone.
func (e *eventSet) Wait(milliseconds uint32) (nvml.EventData, nvml.Return) {
	timeout := time.NewTimer(time.Duration(milliseconds) * time.Millisecond)
	defer timeout.Stop()
	tick, stop := e.lib.machine.poll()
	defer stop()
	for {
		now, ret := e.lib.now()
		switch {
		case closed(e.freed):
			return nvml.EventData{}, nvml.ERROR_INVALID_ARGUMENT
		case closed(e.over):
			return nvml.EventData{}, nvml.ERROR_UNINITIALIZED
		case ret != nvml.SUCCESS:
			return nvml.EventData{}, ret
		}
		if event, ok := e.next(now.State); ok {
			return event, nvml.SUCCESS
		}
		if e.lostOne(now.State) {
			return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST
		}
		select {
		case <-now.changed:
		case <-e.over:
		case <-e.freed:
		case <-tick:
		case <-timeout.C:
			return nvml.EventData{}, nvml.ERROR_TIMEOUT
		}
	}
}

// next takes the first event that the set wants and has not returned.
func (e *eventSet) next(s *State) (nvml.EventData, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range s.Events {
		if event.Number <= e.seen {
			continue
		}
		e.seen = event.Number
		i := slices.IndexFunc(e.wants, func(r registration) bool {
			return r.device.index == event.GPU && r.types&event.Type != 0 && event.Number > r.after
		})
		if i < 0 {
			continue
		}
		data := nvml.EventData{
			Device: e.wants[i].device, EventType: event.Type, EventData: event.Data,
			GpuInstanceId: noInstance, ComputeInstanceId: noInstance,
		}
		if event.Instance != nil {
			data.GpuInstanceId, data.ComputeInstanceId = event.Instance.GPU, event.Instance.Compute
		}
		return data, true
	}
	return nvml.EventData{}, false
}

func (e *eventSet) lostOne(s *State) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(e.wants, func(r registration) bool { return s.GPUs[r.device.index].gone() })
}

// Free ends the set, and the calls that wait for it.
func (e *eventSet) Free() nvml.Return {
	if ret := e.lib.ready(); ret != nvml.SUCCESS {
		return ret
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if closed(e.freed) {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	close(e.freed)
	return nvml.SUCCESS
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
