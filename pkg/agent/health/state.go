package health

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
)

const lostMessage = "the GPU has fallen off the bus"

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
}

// Answered: NVML has answered for the GPU.
func (s *State) Answered(now time.Time, r nvml.Readings) {
	s.asked, s.readings = now, r
	s.quiet = r.RecoveryAction != nil && *r.RecoveryAction == 0
	hot := slices.ContainsFunc(s.faults, func(f Fault) bool { return f.Reason == Temperature && f.counts() })
	present, judged := judge(r, hot)
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
	case errors.Is(err, nvml.ErrNoSession), errors.Is(err, nvml.ErrDriverNotLoaded), errors.Is(err, nvml.ErrLibraryNotFound), errors.Is(err, nvml.ErrVersionMismatch):
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

// Silent: a call about the GPU that began then has not returned.
func (s *State) Silent(now, began time.Time) {
	s.asked, s.quiet = now, false
	s.step(now, []Fault{{Reason: Hung, Message: "NVML has not answered since " + began.UTC().Format(time.RFC3339)}}, []Reason{Hung})
}

// Happened: NVML has told of an event.
func (s *State) Happened(now time.Time, e nvml.Event) {
	var fault *Fault
	switch e.Kind {
	case nvml.EventXID:
		fault = faultOfXID(e.Data)
	case nvml.EventDoubleBitECC:
		fault = &Fault{Reason: XID, Value: fmt.Sprint(xidDoubleBit), Message: fmt.Sprintf("XID %d: %s", xidDoubleBit, xidTexts[xidDoubleBit])}
		if s.readings.ECC != nil {
			// The counter will tell, and tell when it is over.
			fault = nil
		}
	}
	if fault == nil {
		return
	}
	if fault.Reason != Lost {
		fault.Instance = e.Instance
	}
	s.put(now, *fault)
	s.sort()
}

// Renewed: the driver was loaded anew, or the machine started anew. What was latched is over; the rest will be seen again if it is still so.
func (s *State) Renewed() {
	s.faults = slices.DeleteFunc(s.faults, func(f Fault) bool { return f.Reason == XID || f.Reason == NoDriver })
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
		return !f.counts() || !f.gone.IsZero() && now.Sub(f.gone) >= rules[f.Reason].clear || rules[f.Reason].clear == 0
	})
	for i := range s.faults {
		f := &s.faults[i]
		switch isPresent := slices.ContainsFunc(present, func(p Fault) bool { return p.same(f) }); {
		case isPresent:
			f.gone = time.Time{}
		case !slices.Contains(judged, f.Reason):
			// Nothing is known now, so it is not known to be gone.
			f.gone = time.Time{}
		case f.gone.IsZero():
			f.gone = now
		}
	}
	s.sort()
}

// put enters a fault that is seen now.
func (s *State) put(now time.Time, fault Fault) {
	i := slices.IndexFunc(s.faults, func(f Fault) bool { return f.same(&fault) })
	if i < 0 {
		fault.seen = now
		s.faults = append(s.faults, fault)
		i = len(s.faults) - 1
	}
	f := &s.faults[i]
	if f.Value != fault.Value || f.Reason != NoAnswer && f.Reason != Hung {
		f.Value, f.Message = fault.Value, fault.Message
	}
	f.gone = time.Time{}
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

// Of returns the verdict on a device of the GPU: one MIG device, or, for nil, the GPU as a whole, whose verdict holds every fault. What is
// wrong with the whole GPU is wrong with each of its MIG devices; what is wrong with one of them is not wrong with the others. A fault of
// a GPU instance (nvml.AllCompute) is one of all devices in it.
func (s *State) Of(instance *nvml.Instance) Verdict {
	v := Verdict{Status: Healthy, Asked: s.asked}
	for _, f := range s.faults {
		if !f.counts() || !concerns(f.Instance, instance) {
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

// Worst is the severity of the worst fault; ok is false if there is none.
func (v *Verdict) Worst() (fault *Fault, ok bool) {
	if len(v.Faults) == 0 {
		return nil, false
	}
	return &v.Faults[0], true
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
