// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// well are the readings of a GPU that has nothing.
func well() nvml.Readings {
	return nvml.Readings{
		TemperatureC: new(uint32(40)), SlowdownC: new(uint32(87)), PowerMilliwatts: new(uint32(70000)),
		PCIe: &nvml.PCIeLink{Generation: 5, Width: 16, MaxGeneration: 5, MaxWidth: 16}, Throttle: new(uint64(1)),
		ECC: &nvml.ECCErrors{Corrected: 12}, Rows: &nvml.RemappedRows{Corrected: 1}, RecoveryAction: new(uint32(0)),
	}
}

func with(change func(*nvml.Readings)) nvml.Readings {
	r := well()
	change(&r)
	return r
}

// seen is one observation.
type seen func(now time.Time, s *State)

func answered(r nvml.Readings) seen { return func(now time.Time, s *State) { s.Answered(now, r) } }
func failed(err error) seen         { return func(now time.Time, s *State) { s.Failed(now, err) } }
func xid(code uint64, on *nvml.Instance) seen {
	return func(now time.Time, s *State) {
		s.Happened(now, nvml.Event{Kind: nvml.EventXID, Data: code, Instance: on})
	}
}

// then is one observation after the other.
func then(first, second seen) seen {
	return func(now time.Time, s *State) {
		first(now, s)
		second(now, s)
	}
}

func doubleBit(on *nvml.Instance) seen {
	return func(now time.Time, s *State) { s.Happened(now, nvml.Event{Kind: nvml.EventDoubleBitECC, Instance: on}) }
}

func uncorrected(n uint64) seen {
	return answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected = n }))
}

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// told is what others are told of the GPU: its status and the faults as reason=value.
func told(v Verdict) string {
	text := string(v.Status)
	for _, f := range v.Faults {
		text += " " + string(f.Reason)
		if f.Value != "" {
			text += "=" + f.Value
		}
	}
	return text
}

// left is a look at an idle GPU with so much memory in use.
func left(mib uint64) func(time.Time, *State) {
	return func(now time.Time, s *State) { s.Left(now, new(mib<<20)) }
}

// silentSince is a call that began so many seconds after the start.
func silentSince(began int) seen {
	return func(now time.Time, s *State) { s.Silent(now, start.Add(time.Duration(began)*time.Second)) }
}

func isUsed(now time.Time, s *State) { s.Left(now, nil) }

func TestFaultsAreSetAndClearedWithTheirDelays(t *testing.T) {
	hot := with(func(r *nvml.Readings) { r.TemperatureC = new(uint32(87)) })
	warm := with(func(r *nvml.Readings) { r.TemperatureC = new(uint32(84)) })
	near := func(margin int32) nvml.Readings { // at a distance of -2 it slows down
		return with(func(r *nvml.Readings) { r.SlowdownC, r.MarginC, r.SlowdownMarginC = nil, new(margin), new(int32(-2)) })
	}
	old := with(func(r *nvml.Readings) { r.RecoveryAction = nil })
	lost := fmt.Errorf("ask: %w", nvml.ErrGPULost)
	// Each step: seconds since the start, what is seen, what is told after it.
	type step struct {
		at   int
		seen seen
		want string
	}
	tests := map[string][]step{
		"nothing is known before the first answer": {{0, xid(31, nil), "Unknown"}, {1, answered(well()), "Healthy"}},
		"a lost GPU with the second answer, and back after a while": {
			{0, answered(well()), "Healthy"},
			{10, failed(lost), "Healthy"},
			{20, failed(lost), "Unhealthy gpu-lost"},
			{30, answered(well()), "Unhealthy gpu-lost"},
			{50, answered(well()), "Unhealthy gpu-lost"},
			{60, answered(well()), "Healthy"},
		},
		"looks at its memory say nothing of its other faults": {
			{0, failed(lost), "Healthy"},
			{10, failed(lost), "Unhealthy gpu-lost"},
			{20, answered(well()), "Unhealthy gpu-lost"},
			{25, left(0), "Unhealthy gpu-lost"},
			{30, answered(well()), "Unhealthy gpu-lost"},
			{45, left(600), "Unhealthy gpu-lost"},
			{50, answered(well()), "Healthy"},
			{75, left(600), "Healthy memory-left"},
			{80, answered(well()), "Healthy memory-left"},
			{105, left(0), "Healthy"},
		},
		"one that answers again was never lost": {
			{0, failed(lost), "Healthy"},
			{1, failed(lost), "Healthy"}, // because somebody asked between two polls
			{10, answered(well()), "Healthy"},
			{20, failed(lost), "Healthy"},
			{30, answered(well()), "Healthy"},
		},
		"a GPU that NVML does not know is lost": {{0, failed(nvml.ErrNotFound), "Healthy"}, {10, failed(nvml.ErrNotFound), "Unhealthy gpu-lost"}},
		"the time without answers does not count": {
			{-10, failed(lost), "Healthy"},
			{0, failed(lost), "Unhealthy gpu-lost"},
			{10, answered(well()), "Unhealthy gpu-lost"},
			{20, failed(lost), "Unhealthy gpu-lost"},
			{45, answered(well()), "Unhealthy gpu-lost"},
		},
		"XID 79 is not believed alone": {{0, xid(79, nil), "Unknown"}, {10, answered(well()), "Healthy"}, {20, answered(well()), "Healthy"}},
		"nor twice":                    {{0, answered(well()), "Healthy"}, {1, xid(79, nil), "Healthy"}, {7, xid(79, nil), "Healthy"}, {8, failed(lost), "Healthy"}, {18, failed(lost), "Unhealthy gpu-lost"}},
		"nor does XID 154 say which recovery action it is": {
			{0, answered(well()), "Healthy"},
			{1, xid(154, nil), "Healthy"},
			{2, answered(with(func(r *nvml.Readings) { r.RecoveryAction = new(uint32(1)) })), "Unhealthy recovery-action=gpu-reset"},
			{3, xid(154, nil), "Unhealthy recovery-action=gpu-reset"},
			{4, answered(well()), "Unhealthy recovery-action=gpu-reset"},
			{30, answered(well()), "Healthy"},
		},
		"an application's XID is no fault": {
			{0, answered(well()), "Healthy"},
			{1, xid(13, nil), "Healthy"},
			{2, xid(31, nil), "Healthy"},
			{3, xid(43, nil), "Healthy"},
			{4, xid(45, nil), "Healthy"},
			{5, xid(68, nil), "Healthy"},
			{6, xid(109, nil), "Healthy"},
		},
		"nor one that the driver has dealt with": {{0, answered(well()), "Healthy"}, {1, xid(63, nil), "Healthy"}, {2, xid(94, nil), "Healthy"}},
		"another XID, until it has been quiet for long": {
			{0, xid(119, nil), "Unhealthy xid=119"},
			{10, answered(well()), "Unhealthy xid=119"},
			{500, xid(74, nil), "Unhealthy xid=74"},
			{510, answered(well()), "Unhealthy xid=74"},
			{1100, answered(well()), "Unhealthy xid=74"},
			{1110, answered(well()), "Healthy"},
		},
		"an XID stands where the driver does not say what is to be done": {{0, xid(119, nil), "Unhealthy xid=119"}, {10, answered(old), "Unhealthy xid=119"}, {7200, answered(old), "Unhealthy xid=119"}},
		"until the driver is loaded anew":                                {{0, xid(119, nil), "Unhealthy xid=119"}, {10, func(_ time.Time, s *State) { s.Renewed() }, "Unknown"}, {20, answered(old), "Healthy"}},
		"heat must last, and must be gone by a margin": {
			{0, answered(hot), "Healthy"},
			{10, answered(well()), "Healthy"},
			{20, answered(hot), "Healthy"},
			{50, answered(hot), "Unhealthy temperature"},
			{60, answered(warm), "Unhealthy temperature"},
			{200, answered(warm), "Unhealthy temperature"},
			{210, answered(well()), "Unhealthy temperature"},
			{270, answered(well()), "Healthy"},
		},
		"heat, where the driver does not say why it slows down": {
			{0, answered(with(func(r *nvml.Readings) { r.TemperatureC, r.Throttle = new(uint32(95)), nil })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.TemperatureC, r.Throttle = new(uint32(95)), nil })), "Unhealthy temperature"},
		},
		"heat, by the distance to the threshold": {
			{0, answered(near(-2)), "Healthy"},
			{30, answered(near(-2)), "Unhealthy temperature"},
			{40, answered(near(3)), "Unhealthy temperature"},
			{120, answered(near(3)), "Unhealthy temperature"},
			{130, answered(near(4)), "Unhealthy temperature"},
			{190, answered(near(4)), "Healthy"},
			{220, answered(near(-1)), "Healthy"},
			{260, answered(near(-1)), "Healthy"},
		},
		"no temperature is not hot": {
			{0, answered(with(func(r *nvml.Readings) { r.TemperatureC = nil })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.TemperatureC = nil })), "Healthy"},
		},
		"a limit of 0 is none": {
			{0, answered(with(func(r *nvml.Readings) { r.SlowdownC = new(uint32(0)) })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.SlowdownC = new(uint32(0)) })), "Healthy"},
		},
		"a link about which the driver stops to tell": {
			{-10, answered(well()), "Healthy"},
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Unhealthy pcie-width=x8"},
			{40, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 0 })), "Unhealthy pcie-width=x8"},
			{90, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 0 })), "Unhealthy pcie-width=x8"},
		},
		"what is warm was not hot, whatever else it has": {
			{0, answered(with(func(r *nvml.Readings) { r.TemperatureC, r.ECC.Uncorrected = new(uint32(84)), 1 })), "Unhealthy ecc-uncorrected"},
			{60, answered(with(func(r *nvml.Readings) { r.TemperatureC, r.ECC.Uncorrected = new(uint32(84)), 1 })), "Unhealthy ecc-uncorrected"},
		},
		"another error shows that the driver is loaded": {
			{0, failed(nvml.ErrDriverNotLoaded), "Healthy"},
			{30, failed(nvml.ErrDriverNotLoaded), "Unhealthy no-driver"},
			{40, failed(nvml.ErrGPULost), "Healthy"},
			{50, failed(nvml.ErrGPULost), "Unhealthy gpu-lost"},
		},
		"an event of another kind has no XID": {
			{0, answered(well()), "Healthy"},
			{1, func(now time.Time, s *State) {
				s.Happened(now, nvml.Event{Kind: nvml.EventMIGConfig, Data: 48, Instance: &nvml.Instance{GPU: 1}})
			}, "Healthy"},
		},
		"an XID of a MIG device is over, its memory errors are not": {
			{0, xid(46, &nvml.Instance{GPU: 1}), "Unhealthy xid=46"},
			{1, xid(48, &nvml.Instance{GPU: 1}), "Unhealthy ecc-uncorrected xid=46"},
			{2, uncorrected(1), "Unhealthy ecc-uncorrected xid=46"},
			{700, uncorrected(1), "Unhealthy ecc-uncorrected"},
		},
		"what is warm was not hot": {{0, answered(warm), "Healthy"}, {100, answered(warm), "Healthy"}},
		"memory errors until the counter is reset": {
			{0, answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected = 1 })), "Unhealthy ecc-uncorrected"},
			{9000, answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected = 1 })), "Unhealthy ecc-uncorrected"},
			{9010, answered(well()), "Unhealthy ecc-uncorrected"},
			{9030, answered(well()), "Healthy"},
		},
		"a memory error without a counter": {
			{0, answered(with(func(r *nvml.Readings) { r.ECC = nil })), "Healthy"},
			{1, func(now time.Time, s *State) { s.Happened(now, nvml.Event{Kind: nvml.EventDoubleBitECC}) }, "Unhealthy xid=48"},
		},
		"memory that nobody has, seen twice": {
			{-10, answered(well()), "Healthy"},
			{0, left(257), "Healthy"},
			{30, left(300), "Healthy memory-left"},
			{60, left(256), "Healthy"},
			{90, left(257), "Healthy"},
		},
		"seen once, and again when somebody had used the GPU": {
			{-10, answered(well()), "Healthy"},
			{0, left(600), "Healthy"},
			{30, isUsed, "Healthy"},
			{60, left(600), "Healthy"},
			{90, left(600), "Healthy memory-left"},
			{120, isUsed, "Healthy memory-left"},
			{130, answered(well()), "Healthy memory-left"},
			{150, left(0), "Healthy"},
		},
		"as much as the driver may keep": {
			{-10, answered(well()), "Healthy"},
			{0, left(256), "Healthy"},
			{30, left(256), "Healthy"},
		},
		"rows": {
			{0, answered(with(func(r *nvml.Readings) { r.Rows.Pending = true })), "Healthy row-remap-pending"},
			{1, answered(with(func(r *nvml.Readings) { r.Rows.Failed = true })), "Unhealthy row-remap-failed"},
		},
		"the link's width": {
			{-10, answered(well()), "Healthy"},
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Unhealthy pcie-width=x8"},
			{40, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 4 })), "Unhealthy pcie-width=x4"},
			{50, answered(well()), "Unhealthy pcie-width=x4"},
			{80, answered(well()), "Healthy"},
		},
		"a width that no link has": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 63 })), "Healthy"},
			{10, answered(well()), "Healthy"},
			{50, answered(well()), "Healthy"},
		},
		"nor this card": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.MaxWidth = 16, 8 })), "Healthy"},
			{10, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.MaxWidth = 8, 8 })), "Healthy"},
			{50, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.MaxWidth = 8, 8 })), "Healthy"},
		},
		"a link that is trained down to save power": {
			{-10, answered(well()), "Healthy"},
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 1 })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 1 })), "Healthy"},
			{40, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 5 })), "Healthy"},
			{70, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 5 })), "Unhealthy pcie-width=x8"},
			{80, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 1 })), "Unhealthy pcie-width=x8"},
			{200, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.Generation = 8, 1 })), "Unhealthy pcie-width=x8"},
		},
		"fewer lanes than the card's are no fault": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
		},
		"nor are the port's": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.PortWidth = 8, 8 })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.PortWidth = 8, 8 })), "Healthy"},
		},
		"fewer lanes than the port's are": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.PortWidth = 8, 16 })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.PortWidth = 8, 16 })), "Unhealthy pcie-width=x8"},
		},
		"a port of more lanes than the card": {
			{0, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.MaxWidth, r.PCIe.PortWidth = 8, 8, 16 })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.PCIe.Width, r.PCIe.MaxWidth, r.PCIe.PortWidth = 8, 8, 16 })), "Healthy"},
		},
		"another card has lanes of its own": {
			{0, answered(well()), "Healthy"},
			{10, func(_ time.Time, s *State) { s.Is("GPU-other", "") }, "Healthy"},
			{20, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
			{60, answered(with(func(r *nvml.Readings) { r.PCIe.Width = 8 })), "Healthy"},
		},
		"the power brake": {
			{0, answered(with(func(r *nvml.Readings) { r.Throttle = new(uint64(0x80)) })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.Throttle = new(uint64(0x80)) })), "Unhealthy power-brake"},
		},
		"thermal slowdown": {
			{0, answered(with(func(r *nvml.Readings) { r.Throttle = new(uint64(0x40)) })), "Healthy"},
			{30, answered(with(func(r *nvml.Readings) { r.Throttle = new(uint64(0x40)) })), "Unhealthy temperature"},
		},
		"a recovery action": {
			{0, answered(with(func(r *nvml.Readings) { r.RecoveryAction = new(uint32(4)) })), "Unhealthy recovery-action=drain-and-reset"},
			{1, answered(with(func(r *nvml.Readings) { r.RecoveryAction = new(uint32(77)) })), "Unhealthy recovery-action=action-77"},
			{10, answered(well()), "Unhealthy recovery-action=action-77"},
			{30, answered(well()), "Healthy"},
		},
		"a reset that is required shows in the error": {{0, failed(nvml.ErrResetRequired), "Unhealthy recovery-action=gpu-reset"}},
		"silence": {
			{0, answered(well()), "Healthy"},
			{20, silentSince(0), "Healthy"},
			{40, silentSince(0), "Healthy"},
			{50, silentSince(0), "Unhealthy hung"},
			{60, answered(well()), "Unhealthy hung"},
			{90, answered(well()), "Healthy"},
		},
		"slow answers are no silence": {
			{20, silentSince(0), "Healthy"},
			{30, silentSince(0), "Healthy"},
			{40, answered(well()), "Healthy"},
			{60, silentSince(0), "Healthy"},
			{80, silentSince(0), "Healthy"},
			{85, answered(well()), "Healthy"},
		},
		"slow answers are answers: what they do not show any more is over": {
			{0, then(failed(lost), uncorrected(1)), "Unhealthy ecc-uncorrected"},
			{1, failed(lost), "Unhealthy ecc-uncorrected"},
			{10, failed(lost), "Unhealthy gpu-lost ecc-uncorrected"},
			{30, answered(well()), "Unhealthy gpu-lost ecc-uncorrected"},
			{40, silentSince(0), "Unhealthy gpu-lost ecc-uncorrected"},
			{42, answered(well()), "Unhealthy gpu-lost ecc-uncorrected"},
			{52, silentSince(0), "Unhealthy gpu-lost ecc-uncorrected"},
			{54, answered(well()), "Unhealthy gpu-lost"},
			{64, silentSince(0), "Unhealthy gpu-lost"},
			{66, answered(well()), "Healthy"},
		},
		"one that hung, and whose driver is late with each answer since, hangs no more": {
			{10, silentSince(0), "Healthy"},
			{40, silentSince(0), "Unhealthy hung"},
			{45, answered(well()), "Unhealthy hung"},
			{55, silentSince(45), "Unhealthy hung"},
			{57, answered(well()), "Unhealthy hung"},
			{67, silentSince(57), "Unhealthy hung"},
			{69, answered(well()), "Unhealthy hung"},
			{79, silentSince(69), "Unhealthy hung"},
			{81, answered(well()), "Healthy"},
		},
		"one that hangs again soon": {
			{10, silentSince(0), "Healthy"},
			{40, silentSince(0), "Unhealthy hung"},
			{45, answered(well()), "Unhealthy hung"},
			{55, silentSince(45), "Unhealthy hung"},
			{85, silentSince(45), "Unhealthy hung"},
			{90, answered(well()), "Unhealthy hung"},
			{119, answered(well()), "Unhealthy hung"},
			{120, answered(well()), "Healthy"},
		},
		"an error that comes and goes": {{0, failed(errors.New("odd")), "Healthy"}, {10, answered(well()), "Healthy"}, {20, failed(errors.New("odd")), "Healthy"}, {40, failed(errors.New("other")), "Unhealthy no-answer"}},
		"a driver that is loaded anew": {{0, answered(well()), "Healthy"}, {10, failed(nvml.ErrNoSession), "Healthy"}, {20, answered(well()), "Healthy"}, {30, failed(nvml.ErrDriverNotLoaded), "Healthy"}, {60, failed(nvml.ErrDriverNotLoaded), "Unhealthy no-driver"}, {70, answered(well()), "Healthy"}},
		"what is not told is not judged": {
			{0, answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected = 1 })), "Unhealthy ecc-uncorrected"},
			{100, answered(nvml.Readings{}), "Unhealthy ecc-uncorrected"},
			{200, answered(nvml.Readings{}), "Unhealthy ecc-uncorrected"},
		},
		"the worst comes first": {
			{0, answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected, r.Rows.Pending = 1, true })), "Unhealthy ecc-uncorrected row-remap-pending"},
			{1, failed(lost), "Unhealthy ecc-uncorrected row-remap-pending"},
			{10, failed(lost), "Unhealthy gpu-lost ecc-uncorrected row-remap-pending"},
		},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			var s State
			for _, step := range steps {
				step.seen(start.Add(time.Duration(step.at)*time.Second), &s)
				if got := told(s.Of(nil)); got != step.want {
					t.Errorf("after %d s: %q, want %q", step.at, got, step.want)
				}
			}
		})
	}
}

// TestAFaultsMessageStaysTheSame: the kubelet takes another message for another state and updates every pod.
func TestAFaultsMessageStaysTheSame(t *testing.T) {
	for name, look := range map[string]func(i int) seen{
		"temperature": func(i int) seen {
			return answered(with(func(r *nvml.Readings) { r.TemperatureC = new(uint32(90 + uint32(i))) }))
		},
		"memory errors": func(i int) seen {
			return answered(with(func(r *nvml.Readings) { r.ECC.Uncorrected = uint64(1 + i) }))
		},
		"silence": func(int) seen { return silentSince(0) },
		"errors":  func(i int) seen { return failed(fmt.Errorf("call %d", i)) },
	} {
		t.Run(name, func(t *testing.T) {
			var s State
			var messages []string
			for i := range 12 {
				look(i)(start.Add(time.Duration(i)*10*time.Second), &s)
				v := s.Of(nil)
				if v.Status == Unhealthy {
					messages = append(messages, v.Message())
				}
			}
			if len(messages) < 8 || strings.Count(strings.Join(messages, "\n"), messages[0]) != len(messages) {
				t.Errorf("messages %q, want one that stays", messages)
			}
		})
	}
}

func TestAFaultIsThatOfItsPartition(t *testing.T) {
	first, second := &nvml.Instance{GPU: 1, Compute: 0}, &nvml.Instance{GPU: 2, Compute: 0}
	sibling := &nvml.Instance{GPU: 1, Compute: 1}
	tests := map[string]struct {
		seen seen
		// Told of the GPU, the first partition, its sibling in the same GPU instance, the second partition.
		want [4]string
	}{
		"of one":            {xid(46, first), [4]string{"Unhealthy xid=46", "Unhealthy xid=46", "Healthy", "Healthy"}},
		"of a GPU instance": {xid(46, &nvml.Instance{GPU: 1, Compute: nvml.AllCompute}), [4]string{"Unhealthy xid=46", "Unhealthy xid=46", "Unhealthy xid=46", "Healthy"}},
		"of the GPU":        {xid(46, nil), [4]string{"Unhealthy xid=46", "Unhealthy xid=46", "Unhealthy xid=46", "Unhealthy xid=46"}},
		"of an application": {xid(13, first), [4]string{"Healthy", "Healthy", "Healthy", "Healthy"}},
		"a lost GPU is whole": {func(now time.Time, s *State) {
			failed(nvml.ErrGPULost)(now, s)
			failed(nvml.ErrGPULost)(now.Add(PollInterval), s)
		}, [4]string{"Unhealthy gpu-lost", "Unhealthy gpu-lost", "Unhealthy gpu-lost", "Unhealthy gpu-lost"}},
		"what they share":                        {xid(74, first), [4]string{"Unhealthy xid=74", "Unhealthy xid=74", "Unhealthy xid=74", "Unhealthy xid=74"}},
		"memory of one":                          {xid(48, first), [4]string{"Unhealthy ecc-uncorrected", "Unhealthy ecc-uncorrected", "Healthy", "Healthy"}},
		"memory that was contained in one":       {xid(94, first), [4]string{"Unhealthy ecc-uncorrected", "Unhealthy ecc-uncorrected", "Healthy", "Healthy"}},
		"memory that could not be recovered":     {xid(140, first), [4]string{"Unhealthy ecc-uncorrected", "Unhealthy ecc-uncorrected", "Healthy", "Healthy"}},
		"memory that was not contained":          {xid(95, first), [4]string{"Unhealthy xid=95", "Unhealthy xid=95", "Unhealthy xid=95", "Unhealthy xid=95"}},
		"memory of one, by NVML's event":         {doubleBit(first), [4]string{"Unhealthy ecc-uncorrected", "Unhealthy ecc-uncorrected", "Healthy", "Healthy"}},
		"memory of the GPU, which a counter has": {doubleBit(nil), [4]string{"Healthy", "Healthy", "Healthy", "Healthy"}},
		"heat": {
			func(now time.Time, s *State) {
				hot := with(func(r *nvml.Readings) { r.TemperatureC = new(uint32(95)) })
				s.Answered(now, hot)
				s.Answered(now.Add(time.Minute), hot)
			},
			[4]string{"Unhealthy temperature", "Unhealthy temperature", "Unhealthy temperature", "Unhealthy temperature"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var s State
			s.Answered(start, well())
			tc.seen(start, &s)
			got := [4]string{told(s.Of(nil)), told(s.Of(first)), told(s.Of(sibling)), told(s.Of(second))}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("GPU, partition, sibling, other partition (-want +got):\n%s", diff)
			}
			// The GPU as a device of its own has what all of them have, and no more.
			if got := told(s.Whole()); got != tc.want[3] {
				t.Errorf("the whole GPU: %q, want %q", got, tc.want[3])
			}
		})
	}
}

// TestMemoryErrorsAreThoseOfTheirPartition: NVML counts them for the GPU, and tells by events whose they are.
func TestMemoryErrorsAreThoseOfTheirPartition(t *testing.T) {
	first, second := &nvml.Instance{GPU: 1, Compute: 0}, &nvml.Instance{GPU: 2, Compute: 0}
	const one, whole = "Unhealthy ecc-uncorrected", "Healthy"
	// Each step: seconds since the start, what is seen, what is told of the GPU as a whole, the first and the second partition after it.
	type step struct {
		at   int
		seen seen
		want [3]string
	}
	tests := map[string][]step{
		"told, then counted": {
			{0, uncorrected(0), [3]string{whole, whole, whole}},
			{1, doubleBit(first), [3]string{whole, one, whole}},
			{2, uncorrected(2), [3]string{whole, one, whole}},
			{9000, uncorrected(2), [3]string{whole, one, whole}},
		},
		"counted, then told": {
			{0, uncorrected(0), [3]string{whole, whole, whole}},
			{5, uncorrected(1), [3]string{one, one, one}},
			{6, doubleBit(first), [3]string{whole, one, whole}},
			{7, uncorrected(1), [3]string{whole, one, whole}},
		},
		"counted long before": {
			{0, uncorrected(1), [3]string{one, one, one}},
			{60, doubleBit(first), [3]string{one, "Unhealthy ecc-uncorrected ecc-uncorrected", one}},
		},
		"of two": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{1, uncorrected(1), [3]string{whole, one, whole}},
			{2, xid(48, second), [3]string{whole, one, one}},
			{3, uncorrected(2), [3]string{whole, one, one}},
		},
		"and then one that nobody is told to have": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{1, uncorrected(1), [3]string{whole, one, whole}},
			{2, uncorrected(2), [3]string{one, "Unhealthy ecc-uncorrected ecc-uncorrected", one}},
		},
		"until the counter is set back": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{1, uncorrected(3), [3]string{whole, one, whole}},
			{2, uncorrected(0), [3]string{whole, one, whole}},
			{22, uncorrected(0), [3]string{whole, whole, whole}},
			{23, uncorrected(1), [3]string{one, one, one}}, // none of it is explained
		},
		"until the driver is loaded anew": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{1, uncorrected(3), [3]string{whole, one, whole}},
			{2, func(_ time.Time, s *State) { s.Renewed() }, [3]string{whole, whole, whole}},
			{3, uncorrected(1), [3]string{one, one, one}},
		},
		"until the driver is loaded anew, before they were counted": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{2, func(_ time.Time, s *State) { s.Renewed() }, [3]string{"Unknown", "Unknown", "Unknown"}},
			{3, uncorrected(1), [3]string{one, one, one}},
		},
		"until the partition has ended": {
			{0, doubleBit(first), [3]string{"Unknown", one, "Unknown"}},
			{1, uncorrected(1), [3]string{whole, one, whole}},
			{2, func(_ time.Time, s *State) { s.Ended(*first) }, [3]string{whole, whole, whole}},
			{3, uncorrected(1), [3]string{whole, whole, whole}},
		},
		"where there is no counter": {
			{0, answered(with(func(r *nvml.Readings) { r.ECC = nil })), [3]string{whole, whole, whole}},
			{1, doubleBit(first), [3]string{whole, one, whole}},
			{9000, answered(with(func(r *nvml.Readings) { r.ECC = nil })), [3]string{whole, one, whole}},
		},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			var s State
			for _, step := range steps {
				step.seen(start.Add(time.Duration(step.at)*time.Second), &s)
				if diff := cmp.Diff(step.want, [3]string{told(s.Whole()), told(s.Of(first)), told(s.Of(second))}); diff != "" {
					t.Errorf("after %d s (-want +got):\n%s", step.at, diff)
				}
				// An agent that starts now goes on from there.
				data, err := s.encode("boot")
				if err != nil {
					t.Fatal(err)
				}
				kept, err := decode(data, "boot")
				if err != nil {
					t.Fatal(err)
				}
				kept.asked, kept.readings, kept.quiet = s.asked, s.readings, s.quiet
				s = kept
			}
		})
	}
}

// TestAFaultEndsWithItsPartition: another one may get its IDs.
func TestAFaultEndsWithItsPartition(t *testing.T) {
	first, sibling, other := nvml.Instance{GPU: 1, Compute: 0}, nvml.Instance{GPU: 1, Compute: 1}, nvml.Instance{GPU: 2, Compute: 0}
	all := nvml.Instance{GPU: 1, Compute: nvml.AllCompute}
	found := func(instances ...nvml.Instance) []nvml.GPUInstance {
		var list []nvml.GPUInstance
		for _, i := range instances {
			list = append(list, nvml.GPUInstance{ID: i.GPU, Devices: []nvml.MIGDevice{{GPUInstance: i.GPU, ComputeInstance: i.Compute}}})
		}
		return list
	}
	later, before := start.Add(time.Second), start.Add(-time.Second)
	tests := map[string]struct {
		of   nvml.Instance
		ends func(s *State)
		gone bool
	}{
		"it is destroyed":                      {first, func(s *State) { s.Ended(first) }, true},
		"its GPU instance is":                  {first, func(s *State) { s.Ended(all) }, true},
		"its sibling is":                       {first, func(s *State) { s.Ended(sibling) }, false},
		"another one is":                       {first, func(s *State) { s.Ended(other) }, false},
		"a GPU instance is":                    {all, func(s *State) { s.Ended(all) }, true},
		"one of a GPU instance is":             {all, func(s *State) { s.Ended(first) }, false},
		"it is not found any more":             {first, func(s *State) { s.Partitioned(later, found(other)) }, true},
		"its sibling is found":                 {first, func(s *State) { s.Partitioned(later, found(sibling, other)) }, true},
		"its GPU instance is found":            {all, func(s *State) { s.Partitioned(later, found(sibling)) }, false},
		"nothing is found":                     {all, func(s *State) { s.Partitioned(later, nil) }, true},
		"it is found":                          {first, func(s *State) { s.Partitioned(later, found(other, first)) }, false},
		"it was not found before it had fault": {first, func(s *State) { s.Partitioned(before, nil) }, false},
		"the driver is loaded anew":            {first, func(s *State) { s.Renewed() }, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var s State
			s.Answered(start, well())
			xid(46, &tc.of)(start, &s)
			s.Failed(start, nvml.ErrGPULost) // which is not the partition's
			s.Failed(start.Add(PollInterval), nvml.ErrGPULost)
			tc.ends(&s)
			want := "Unhealthy gpu-lost xid=46"
			if tc.gone {
				want = "Unhealthy gpu-lost"
			}
			if got := told(s.Of(nil)); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}

func TestAMessageNamesThePartition(t *testing.T) {
	for want, instance := range map[string]*nvml.Instance{
		"XID 46: an error that is not known to be an application's (MIG device 3/1)":     {GPU: 3, Compute: 1},
		"XID 46: an error that is not known to be an application's (MIG GPU instance 3)": {GPU: 3, Compute: nvml.AllCompute},
		"XID 46: an error that is not known to be an application's":                      nil,
	} {
		var s State
		xid(46, instance)(start, &s)
		if v := s.Of(nil); v.Message() != want {
			t.Errorf("message %q, want %q", v.Message(), want)
		}
	}
}

func TestFaultsAreKeptOverRestartsOfTheAgentOnly(t *testing.T) {
	var s State
	s.Answered(start, well())
	xid(46, &nvml.Instance{GPU: 3})(start, &s)
	s.Answered(start.Add(time.Second), with(func(r *nvml.Readings) { r.TemperatureC = new(uint32(95)) })) // not long enough to count
	data, err := s.encode("boot-1")
	if err != nil {
		t.Fatal(err)
	}
	kept, err := decode(data, "boot-1")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := told(kept.Of(nil)), "Unhealthy xid=46"; got != want {
		t.Errorf("after a restart: %q, want %q", got, want)
	}
	if got, want := told(kept.Of(&nvml.Instance{GPU: 4})), "Unknown"; got != want {
		t.Errorf("after a restart, another partition: %q, want %q", got, want)
	}
	// It is over as it would have been without the restart.
	kept.Answered(start.Add(time.Minute), well())
	kept.Answered(start.Add(11*time.Minute), well())
	if got := told(kept.Of(nil)); got != "Healthy" {
		t.Errorf("after the quiet time: %q", got)
	}
	rebooted, err := decode(data, "boot-2")
	if err != nil {
		t.Fatal(err)
	}
	if got := told(rebooted.Of(nil)); got != "Unknown" {
		t.Errorf("after a reboot: %q, want Unknown", got)
	}
	for _, bad := range []string{"", "{", `{"version": 2, "bootID": "boot-1"}`, `{"version": 1, "bootID": "boot-1", "faults": [{"reason": "bored", "since": "2026-01-01T00:00:00Z"}]}`} {
		if _, err := decode([]byte(bad), "boot-1"); err == nil {
			t.Errorf("record %q is read without an error", bad)
		}
	}
}

// TestLanesThatNoLinkHasAreNotRemembered: an earlier agent may have written any number that it was told.
func TestLanesThatNoLinkHasAreNotRemembered(t *testing.T) {
	for _, boot := range []string{"boot-1", "boot-2"} {
		for lanes, want := range map[int]int{8: 8, 16: 16, 63: 0} {
			s, err := decode(fmt.Appendf(nil, `{"version": 1, "bootID": "boot-1", "lanes": %d}`, lanes), boot)
			if err != nil || s.lanes != want {
				t.Errorf("%d lanes, read in %s: %d, %v, want %d", lanes, boot, s.lanes, err, want)
			}
		}
	}
}

// TestFaultsHaveOneOrder, whatever the order in which they were seen: the kubelet takes another message for another state.
func TestFaultsHaveOneOrder(t *testing.T) {
	instances := []*nvml.Instance{nil, {GPU: 1, Compute: 0}, {GPU: 1, Compute: 1}, {GPU: 2, Compute: 0}}
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 3, 0, 2}} {
		var s State
		for _, i := range order {
			xid(46, instances[i])(start, &s)
		}
		var got []*nvml.Instance
		for _, f := range s.faults {
			got = append(got, f.Instance)
		}
		if diff := cmp.Diff(instances, got); diff != "" {
			t.Errorf("seen in the order %v (-want +got):\n%s", order, diff)
		}
	}
}

func TestWhoHasToAct(t *testing.T) {
	for reason, want := range map[Reason]bool{Lost: true, ECC: true, XID: false, Hung: false} {
		if f := (Fault{Reason: reason}); f.Permanent() != want {
			t.Errorf("%s is permanent: %v, want %v", reason, f.Permanent(), want)
		}
	}
}

// TestAVerdictSaysAll that is wrong, and when the GPU was asked; one that says something else is another one.
func TestAVerdictSaysAll(t *testing.T) {
	var s State
	s.Silent(start.Add(-time.Minute), start)
	s.Silent(start, start)
	xid(119, nil)(start, &s)
	v := s.Of(nil)
	if got, want := v.Message(), "NVML has not answered since 2026-01-01T00:00:00Z; XID 119: the GPU's system processor does not answer"; got != want {
		t.Errorf("message %q, want %q", got, want)
	}
	if !v.Asked.Equal(start) {
		t.Errorf("asked at %s", v.Asked)
	}
	for name, change := range map[string]func(*Verdict){
		"status":  func(v *Verdict) { v.Status = Healthy },
		"faults":  func(v *Verdict) { v.Faults = v.Faults[:1] },
		"reason":  func(v *Verdict) { v.Faults[0].Reason = Lost },
		"value":   func(v *Verdict) { v.Faults[1].Value = "74" },
		"message": func(v *Verdict) { v.Faults[1].Message = "another" },
	} {
		same, other := s.Of(nil), s.Of(nil)
		if change(&other); v.equal(&other) || !v.equal(&same) {
			t.Errorf("another %s is the same verdict: %v; the same is: %v", name, v.equal(&other), v.equal(&same))
		}
	}
}

// TestMemoryThatWasLeftIsOverWithTheDriver that had it: the next one judges anew, and not while somebody uses the GPU.
func TestMemoryThatWasLeftIsOverWithTheDriver(t *testing.T) {
	var s State
	for look := range 2 {
		s.Left(start.Add(time.Duration(look)*LookInterval), new(uint64(1)<<30))
	}
	if verdict := s.Of(nil); len(verdict.Faults) != 1 {
		t.Fatalf("seen twice: %v", verdict.Faults)
	}
	s.Renewed()
	s.Left(start.Add(2*LookInterval), nil)
	if verdict := s.Of(nil); len(verdict.Faults) != 0 {
		t.Errorf("the driver is loaded anew: %v", verdict.Faults)
	}
}
