// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
)

const (
	lostMessage = "the GPU has fallen off the bus"
	// maxLanes is the widest PCIe link that there is.
	maxLanes = 16
)

// State is what is known of one GPU. The zero value knows nothing. It has no clock: each method is told the time, which must not go back.
type State struct {
	// faults that count, and such as have not lasted long enough, worst first.
	faults []Fault
	// asked is when NVML last answered or was last found not to; zero if never.
	asked time.Time
	// readings are the last ones.
	readings nvml.Readings
	// quiet tells that the last readings say that nothing is to be done to the GPU; false also if the driver does not say.
	quiet bool
	// explained is how many of the counted memory errors are those of MIG devices. explaining: all up to the next reading are.
	explained  uint64
	explaining bool
	// uuid of the GPU, and the most lanes that its PCIe link was seen with.
	uuid  string
	lanes int
	// model of the GPU, and how its faults are judged.
	model  string
	policy Policy
}

// Is tells which GPU it is, and of which product. Another one than before has a link of its own.
func (s *State) Is(uuid, model string) {
	if s.uuid != uuid {
		s.uuid, s.lanes = uuid, 0
	}
	s.model = model
	s.soften()
}

// soften makes faults as severe as the policy has them, and forgets those that it switches off.
func (s *State) soften() {
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool { return s.policy.severity(s.model, &f) == off })
	for i := range s.faults {
		f := &s.faults[i]
		f.softer = rules[f.Reason].severity - s.policy.severity(s.model, f)
	}
	s.sort()
}

// Answered: NVML has answered for the GPU.
func (s *State) Answered(now time.Time, r nvml.Readings) {
	s.asked, s.readings = now, r
	s.quiet = r.RecoveryAction != nil && *r.RecoveryAction == 0
	hot := slices.ContainsFunc(s.faults, func(f Fault) bool { return f.Reason == Temperature && f.counts() })
	if r.ECC != nil {
		if s.explaining {
			s.explained, s.explaining = r.ECC.Uncorrected, false
		}
		s.explained = min(s.explained, r.ECC.Uncorrected) // the driver has set the counter back
	}
	if l := r.PCIe; l != nil && l.Width <= min(maxLanes, cmp.Or(l.MaxWidth, maxLanes)) {
		s.lanes = max(s.lanes, l.Width)
	}
	present, judged := judge(r, hot, s.explained, s.lanes)
	if r.ECC != nil && r.ECC.Uncorrected > 0 {
		// Those of MIG devices stand as long as the counter does.
		for _, f := range s.faults {
			if f.Reason == ECC && f.Instance != nil {
				present = append(present, f)
			}
		}
	}
	judged = append(judged, Lost, Hung, NoAnswer, NoDriver)
	if s.quiet {
		// The driver would say if something had to be done. An older driver doesn't, and then an XID stands until it is loaded anew.
		judged = append(judged, XID)
	}
	s.step(now, present, judged)
}

// Failed: NVML has answered with an error.
func (s *State) Failed(now time.Time, err error) {
	s.asked, s.quiet = now, false
	var fault Fault
	switch {
	case errors.Is(err, nvml.ErrGPULost), errors.Is(err, nvml.ErrNotFound):
		fault = Fault{Reason: Lost, Message: lostMessage}
	case errors.Is(err, nvml.ErrVersionMismatch):
		fault = Fault{Reason: NoDriver, Message: "the NVIDIA driver has another version than its library, as after an upgrade"}
	case errors.Is(err, nvml.ErrNoSession), errors.Is(err, nvml.ErrDriverNotLoaded), errors.Is(err, nvml.ErrLibraryNotFound):
		fault = Fault{Reason: NoDriver, Message: "the NVIDIA driver is not loaded"}
	case errors.Is(err, nvml.ErrResetRequired):
		fault = Fault{Reason: Recovery, Value: recoveryActions[1].word, Message: recoveryActions[1].text}
	default:
		fault = Fault{Reason: NoAnswer, Message: err.Error()}
	}
	judged := []Reason{fault.Reason, Hung}
	if fault.Reason != NoDriver {
		judged = append(judged, NoDriver)
	}
	s.step(now, []Fault{fault}, judged)
}

// memoryLeft is how much may be in use of an idle GPU beyond what its driver says that it keeps for itself: it keeps some more of it
// after a GPU was used.
const memoryLeft = 256 << 20

// Left: so many bytes are in use although nobody uses the GPU, beyond what the driver keeps for itself. nil: somebody uses it, or that is
// not known. What stands stays then, and what was seen once has to be seen twice in a row again. It is no poll: of the GPU's other faults
// nothing is known by it, and since when they are gone stays.
func (s *State) Left(now time.Time, bytes *uint64) {
	isLeft := func(f Fault) bool { return f.Reason == MemoryLeft }
	switch i := slices.IndexFunc(s.faults, isLeft); {
	case bytes == nil:
		s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool { return isLeft(f) && !f.counts() })
	case *bytes <= memoryLeft:
		s.faults = slices.DeleteFunc(s.faults, isLeft)
	default:
		fault := Fault{Reason: MemoryLeft, Message: fmt.Sprintf("%d MiB of memory are in use, and nobody uses the GPU", *bytes>>20)}
		if i >= 0 {
			fault.Message = s.faults[i].Message // which does not change while the fault lasts
		}
		s.put(now, fault)
		s.soften()
	}
}

// Silent: a call about the GPU that began then has not returned, which says nothing of other faults: a busy driver may be late each time.
// One that hung, and has answered since, hangs again only once this call, too, has lasted as long as makes the fault count.
func (s *State) Silent(now, began time.Time) {
	s.asked, s.quiet = now, false
	hasAnswered := func(f Fault) bool { return f.Reason == Hung && !f.Gone.IsZero() }
	if slices.ContainsFunc(s.faults, hasAnswered) && now.Sub(began) < Deadline+rules[Hung].set {
		return
	}
	s.put(now, Fault{Reason: Hung, Message: "NVML has not answered since " + began.UTC().Format(time.RFC3339)})
	s.soften()
}

// Happened: NVML has told of an event.
func (s *State) Happened(now time.Time, e nvml.Event) {
	instance := e.Instance
	if e.Kind == nvml.EventXID && wholeXIDs[e.Data] {
		instance = nil
	}
	var fault *Fault
	switch {
	case instance != nil && (e.Kind == nvml.EventDoubleBitECC || e.Kind == nvml.EventXID && memoryXIDs[e.Data]):
		fault = &Fault{Reason: ECC, Message: "the memory has had errors that could not be corrected"}
		s.explain(now)
	case e.Kind == nvml.EventXID:
		fault = faultOfXID(e.Data)
	case e.Kind == nvml.EventDoubleBitECC && s.readings.ECC == nil: // otherwise the counter will tell, and tell when it is over
		fault = &Fault{Reason: XID, Value: fmt.Sprint(xidDoubleBit), Message: fmt.Sprintf("XID %d: %s", xidDoubleBit, xidTexts[xidDoubleBit])}
	}
	if fault == nil || s.policy.severity(s.model, fault) == off {
		return
	}
	if instance != nil {
		fault.Instance = instance
		fault.Message += " (" + describe(instance) + ")"
	}
	s.put(now, *fault)
	s.soften()
}

// explain accounts the memory errors up to the next reading, and such as were read just before they were told, to a MIG device.
func (s *State) explain(now time.Time) {
	s.explaining = true
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool {
		return f.Reason == ECC && f.Instance == nil && now.Sub(f.seen) <= PollInterval
	})
}

// describe names MIG devices, for messages.
func describe(i *nvml.Instance) string {
	if i.Compute == nvml.AllCompute {
		return fmt.Sprintf("MIG GPU instance %d", i.GPU)
	}
	return fmt.Sprintf("MIG device %d/%d", i.GPU, i.Compute)
}

// Ended: the MIG device, or all of a GPU instance (nvml.AllCompute), has been destroyed. What was wrong with it is not wrong with one
// that is made in its place and gets its IDs: what is wrong with the place itself shows in the readings of the GPU.
func (s *State) Ended(gone nvml.Instance) {
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool { return f.Instance != nil && within(*f.Instance, gone) })
}

// within tells whether a is b, or in the GPU instance b.
func within(a, b nvml.Instance) bool {
	return a.GPU == b.GPU && (a.Compute == b.Compute || b.Compute == nvml.AllCompute)
}

// Partitioned: there were these GPU instances at that time. What was seen of others before is over with them.
func (s *State) Partitioned(at time.Time, instances []nvml.GPUInstance) {
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool {
		return f.Instance != nil && f.seen.Before(at) && !exists(*f.Instance, instances)
	})
}

func exists(i nvml.Instance, instances []nvml.GPUInstance) bool {
	return slices.ContainsFunc(instances, func(g nvml.GPUInstance) bool {
		return g.ID == i.GPU && (i.Compute == nvml.AllCompute ||
			slices.ContainsFunc(g.Devices, func(d nvml.MIGDevice) bool { return d.ComputeInstance == i.Compute }))
	})
}

// Renewed: the driver was loaded anew, or the machine started anew, which also ends all MIG devices. What was latched is over; the
// rest will be seen again if it is still so.
func (s *State) Renewed() {
	s.explained, s.explaining = 0, false
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool {
		return f.Reason == XID || f.Reason == NoDriver || f.Reason == MemoryLeft || f.Instance != nil
	})
}

// step enters what is present, and lets go of what was judged and is not.
func (s *State) step(now time.Time, present []Fault, judged []Reason) {
	for _, fault := range present {
		s.put(now, fault)
	}
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool {
		if slices.ContainsFunc(present, func(p Fault) bool { return p.same(&f) }) || !slices.Contains(judged, f.Reason) {
			return false
		}
		// Not counted yet, or long enough gone.
		return !f.counts() || !f.Gone.IsZero() && now.Sub(f.Gone) >= rules[f.Reason].clear || rules[f.Reason].clear == 0
	})
	for i := range s.faults {
		f := &s.faults[i]
		switch isPresent := slices.ContainsFunc(present, func(p Fault) bool { return p.same(f) }); {
		case isPresent:
			f.Gone = time.Time{}
		case !slices.Contains(judged, f.Reason):
			// Nothing is known now, so it is not known to be gone.
			f.Gone = time.Time{}
		case f.Gone.IsZero(), f.Gone.After(now): // the clock was set back
			f.Gone = now
		}
	}
	s.soften()
}

// put enters a fault that is seen now. A softer one, such as another XID, does not take a harder one's place.
func (s *State) put(now time.Time, fault Fault) {
	i := slices.IndexFunc(s.faults, func(f Fault) bool { return f.same(&fault) })
	if i >= 0 && s.policy.severity(s.model, &fault) < s.policy.severity(s.model, &s.faults[i]) {
		return
	}
	if i < 0 {
		fault.seen = now
		s.faults = append(s.faults, fault)
		i = len(s.faults) - 1
	}
	f := &s.faults[i]
	if f.Value != fault.Value || f.Reason != NoAnswer && f.Reason != Hung {
		f.Value, f.Message = fault.Value, fault.Message
	}
	f.Gone = time.Time{}
	if !f.counts() && now.Sub(f.seen) >= rules[f.Reason].set {
		f.Since = f.seen
	}
}

func (s *State) sort() { slices.SortFunc(s.faults, compare) }

// Readings are NVML's last.
func (s *State) Readings() nvml.Readings { return s.readings }

// Status of a device, as the kubelet has it.
type Status string

// The statuses.
const (
	Unknown   Status = "Unknown"
	Healthy   Status = "Healthy"
	Unhealthy Status = "Unhealthy"
)

// Verdict is what is decided about one device.
type Verdict struct {
	Status Status
	// Faults that count, worst first; a Notice alone leaves the device Healthy.
	Faults []Fault
	// Asked is when NVML last answered or was found not to; zero if never.
	Asked time.Time
}

// Of returns the verdict on a device of the GPU: one MIG device, or, for nil, on everything, which holds every fault. What is
// wrong with the whole GPU is wrong with each of its MIG devices; what is wrong with one of them is not wrong with the others. A fault of
// a GPU instance (nvml.AllCompute) is one of all devices in it.
func (s *State) Of(instance *nvml.Instance) Verdict {
	return s.verdict(func(f *Fault) bool { return concerns(f.Instance, instance) })
}

// Whole returns the verdict on the GPU as a whole, without what is wrong with single MIG devices.
func (s *State) Whole() Verdict {
	return s.verdict(func(f *Fault) bool { return f.Instance == nil })
}

func (s *State) verdict(about func(*Fault) bool) Verdict {
	v := Verdict{Status: Healthy, Asked: s.asked}
	for _, f := range s.faults {
		if !f.counts() || !about(&f) {
			continue
		}
		v.Faults = append(v.Faults, f)
		if f.Severity() > Notice {
			v.Status = Unhealthy
		}
	}
	if s.asked.IsZero() && v.Status == Healthy {
		v.Status = Unknown
	}
	return v
}

func concerns(fault, device *nvml.Instance) bool {
	return fault == nil || device == nil ||
		fault.GPU == device.GPU && (fault.Compute == device.Compute || fault.Compute == nvml.AllCompute || device.Compute == nvml.AllCompute)
}

// Message is for people, empty for a device without faults.
func (v *Verdict) Message() string {
	text := ""
	for i, f := range v.Faults {
		if i > 0 {
			text += "; "
		}
		text += f.Message
	}
	return text
}

// equal tells whether nothing that others are told differs.
func (v *Verdict) equal(w *Verdict) bool {
	return v.Status == w.Status && slices.EqualFunc(v.Faults, w.Faults, func(a, b Fault) bool {
		return a.same(&b) && a.Value == b.Value && a.Message == b.Message
	})
}
