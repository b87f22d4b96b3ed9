// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// Bits of NVML's clocksEventReasons that tell of a fault outside of the GPU's own power management.
const (
	throttleHWThermal    = 0x40
	throttleHWPowerBrake = 0x80
)

// recoveryActions are NVML's nvmlDeviceGpuRecoveryAction, with a word for taints.
var recoveryActions = map[uint32]struct{ word, text string }{
	1: {"gpu-reset", "the driver asks for a reset of the GPU"},
	2: {"node-reboot", "the driver asks for a reboot of the node"},
	3: {"drain-p2p", "the driver asks to end peer-to-peer traffic to the GPU"},
	4: {"drain-and-reset", "the driver asks to end all use of the GPU and to reset it"},
}

// margin is how far below the slow-down temperature a hot GPU has to cool down.
const marginC = 5

// judge returns what the readings say is wrong with the whole GPU, and the reasons on which they say something at all: of what the GPU
// or its driver does not tell nothing is concluded. hot tells that the GPU was too hot before, which makes the margin count; explained
// memory errors are those of MIG devices; lanes are the most that the PCIe link was seen with.
//
// The generation of the PCIe link is not judged, because an idle GPU lowers it to save power. Some lower the width with it, so a narrow
// link is judged at its full generation only.
func judge(r nvml.Readings, hot bool, explained uint64, lanes int) (faults []Fault, judged []Reason) {
	about := func(reason Reason, known, bad bool, value, message string) {
		if !known {
			return
		}
		judged = append(judged, reason)
		if bad {
			faults = append(faults, Fault{Reason: reason, Value: value, Message: message})
		}
	}
	tooHot, known := overheated(r, hot)
	throttled := r.Throttle != nil && *r.Throttle&throttleHWThermal != 0
	about(Temperature, known || r.Throttle != nil, throttled || tooHot, "", "the GPU is so hot that it slows down")
	about(Power, r.Throttle != nil, r.Throttle != nil && *r.Throttle&throttleHWPowerBrake != 0, "", "the power supply makes the GPU slow down")
	if l := r.PCIe; l != nil {
		// A driver that does not know answers 0. A card may have more lanes than the port that it is plugged into, and then it never has these;
		// where the port is not known, the link is compared with itself.
		if l.PortWidth > 0 && l.MaxWidth > 0 {
			lanes = min(l.PortWidth, l.MaxWidth)
		}
		full := l.Width >= lanes || l.Generation >= l.MaxGeneration
		about(PCIe, l.Width > 0 && full, l.Width < lanes, fmt.Sprintf("x%d", l.Width),
			fmt.Sprintf("the PCIe link has %d of %d lanes", l.Width, lanes))
	}
	about(ECC, r.ECC != nil, r.ECC != nil && r.ECC.Uncorrected > explained, "",
		"the memory has had errors that could not be corrected since the driver was loaded")
	about(RowFailed, r.Rows != nil, r.Rows != nil && r.Rows.Failed, "",
		"a bad row of the memory could not be replaced: the GPU has to be exchanged")
	about(RowPending, r.Rows != nil, r.Rows != nil && r.Rows.Pending, "", "a bad row of the memory is replaced with the next reset of the GPU")
	if a := r.RecoveryAction; a != nil {
		action, ok := recoveryActions[*a]
		if !ok {
			action.word, action.text = fmt.Sprintf("action-%d", *a),
				fmt.Sprintf("the driver asks for a recovery that this agent does not know (%d)", *a)
		}
		about(Recovery, true, *a != 0, action.word, action.text)
	}
	return faults, judged
}

// overheated compares the temperature with the GPU's own threshold, in whichever form it has one; known tells whether it has. A GPU that
// was too hot has to cool down by the margin.
func overheated(r nvml.Readings, hot bool) (tooHot, known bool) {
	var margin int64
	if hot {
		margin = marginC
	}
	switch {
	case r.MarginC != nil && r.SlowdownMarginC != nil:
		return int64(*r.MarginC) <= int64(*r.SlowdownMarginC)+margin, true
	case r.TemperatureC != nil && r.SlowdownC != nil && *r.SlowdownC > 0:
		return int64(*r.TemperatureC) >= int64(*r.SlowdownC)-margin, true
	}
	return false, false
}
