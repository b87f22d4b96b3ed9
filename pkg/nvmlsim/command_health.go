// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// RaiseXID reports an error of the GPU or of something that runs on it.
type RaiseXID struct {
	GPU  string `json:"gpu"`
	Code uint64 `json:"code"`
	// Instance that it is about, nil for the whole GPU.
	Instance *Instance `json:"instance,omitempty"`
}

// Name implements Command.
func (*RaiseXID) Name() string { return "xid" }

func (c *RaiseXID) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case c.Code == 0 || c.Code > 1000:
		return Result{}, fmt.Errorf("code: %d: want an XID from 1 to 1000", c.Code)
	}
	if err := g.has(c.Instance); err != nil {
		return Result{}, err
	}
	s.emit(Event{GPU: i, Type: nvml.EventTypeXidCriticalError, Data: c.Code, Instance: c.Instance})
	return Result{}, nil
}

// has says that there is no such compute instance; nil, for the whole GPU, always is.
func (g *GPUState) has(i *Instance) error {
	if i != nil && (g.instance(i.GPU) == nil || g.instance(i.GPU).compute(i.Compute) == nil) {
		return fmt.Errorf("instance: %d/%d: there is no such compute instance", i.GPU, i.Compute)
	}
	return nil
}

// CountECC adds memory errors, and reports them.
type CountECC struct {
	GPU string `json:"gpu"`
	ECCCounts
	// Instance that has them, nil for the whole GPU, whose counters count them in any case.
	Instance *Instance `json:"instance,omitempty"`
}

// Name implements Command.
func (*CountECC) Name() string { return "ecc" }

func (c *CountECC) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case !m.profile.GPU.ECC:
		return Result{}, fmt.Errorf("gpu: %q: the GPU has no error correction", c.GPU)
	case c.Corrected == 0 && c.Uncorrected == 0:
		return Result{}, errors.New("corrected, uncorrected: 0: want a number of errors")
	}
	if err := g.has(c.Instance); err != nil {
		return Result{}, err
	}
	for _, counts := range []*ECCCounts{&g.Health.Volatile, &g.Health.Aggregate} {
		counts.Corrected += c.Corrected
		counts.Uncorrected += c.Uncorrected
	}
	if c.Corrected > 0 {
		s.emit(Event{GPU: i, Type: nvml.EventTypeSingleBitEccError, Instance: c.Instance})
	}
	if c.Uncorrected > 0 {
		s.emit(Event{GPU: i, Type: nvml.EventTypeDoubleBitEccError, Instance: c.Instance})
	}
	return Result{}, nil
}

// SetTemperature of a GPU; nil for that of an idle one.
type SetTemperature struct {
	GPU     string  `json:"gpu"`
	Celsius *uint32 `json:"celsius,omitempty"`
}

// Name implements Command.
func (*SetTemperature) Name() string { return "temp" }

func (c *SetTemperature) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case c.Celsius != nil && *c.Celsius > 150:
		return Result{}, fmt.Errorf("celsius: %d: want at most 150", *c.Celsius)
	}
	g.Health.TemperatureC = c.Celsius
	return Result{}, nil
}

// SetPower is what a GPU draws; nil for that of an idle one.
type SetPower struct {
	GPU   string  `json:"gpu"`
	Watts *uint32 `json:"watts,omitempty"`
}

// Name implements Command.
func (*SetPower) Name() string { return "power" }

func (c *SetPower) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case c.Watts != nil && *c.Watts > 2*m.profile.GPU.Power.MaxWatts:
		return Result{}, fmt.Errorf("watts: %d: want at most twice the GPU's limit, %d", *c.Watts, 2*m.profile.GPU.Power.MaxWatts)
	}
	g.Health.PowerWatts = c.Watts
	return Result{}, nil
}

// SetPCIe is the link that a GPU has come down to; nil for the best.
type SetPCIe struct {
	GPU  string `json:"gpu"`
	Link *PCIe  `json:"link,omitempty"`
	// Replays are added to the counter of packets sent again.
	Replays int `json:"replays,omitempty"`
}

// Name implements Command.
func (*SetPCIe) Name() string { return "pcie" }

func (c *SetPCIe) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	best := m.profile.GPU.PCIe.link()
	switch {
	case err != nil:
		return Result{}, err
	case c.Link != nil && (c.Link.Generation < 1 || c.Link.Generation > best.Generation):
		return Result{}, fmt.Errorf("link.generation: %d: want 1 to %d", c.Link.Generation, best.Generation)
	case c.Link != nil && (c.Link.Width < 1 || c.Link.Width > best.Width || c.Link.Width&(c.Link.Width-1) != 0):
		return Result{}, fmt.Errorf("link.width: %d: want a power of two up to %d", c.Link.Width, best.Width)
	case c.Replays < 0:
		return Result{}, fmt.Errorf("replays: %d: want 0 or more", c.Replays)
	}
	g.Health.PCIe = c.Link
	g.Health.PCIeReplays += c.Replays
	return Result{}, nil
}

// throttleReasons are NVML's, in the words of nvidia-smi -q.
var throttleReasons = map[string]uint64{
	"idle":                nvml.ClocksEventReasonGpuIdle,
	"sw-power-cap":        nvml.ClocksEventReasonSwPowerCap,
	"hw-slowdown":         nvml.ClocksThrottleReasonHwSlowdown,
	"sync-boost":          nvml.ClocksEventReasonSyncBoost,
	"sw-thermal-slowdown": nvml.ClocksEventReasonSwThermalSlowdown,
	"hw-thermal-slowdown": nvml.ClocksThrottleReasonHwThermalSlowdown,
	"hw-power-brake":      nvml.ClocksThrottleReasonHwPowerBrakeSlowdown,
}

func allThrottleReasons() (mask uint64) {
	for _, bit := range throttleReasons {
		mask |= bit
	}
	return mask
}

// SetThrottle is why a GPU runs below its clock; empty for no reason.
type SetThrottle struct {
	GPU     string   `json:"gpu"`
	Reasons []string `json:"reasons,omitempty"`
}

// Name implements Command.
func (*SetThrottle) Name() string { return "throttle" }

func (c *SetThrottle) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	g.Health.Throttle = 0
	for _, reason := range c.Reasons {
		bit, ok := throttleReasons[reason]
		if !ok {
			return Result{}, fmt.Errorf("reasons: %q: want some of %s", reason, words(throttleReasons))
		}
		g.Health.Throttle |= bit
	}
	s.emit(Event{GPU: i, Type: nvml.EventTypeClock})
	return Result{}, nil
}

// SetRecovery is what the driver says must be done to a GPU.
type SetRecovery struct {
	GPU    string   `json:"gpu"`
	Action Recovery `json:"action"`
}

// Name implements Command.
func (*SetRecovery) Name() string { return "recovery" }

func (c *SetRecovery) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	action, ok := recoveries[c.Action]
	if !ok {
		return Result{}, fmt.Errorf("action: %q: want one of %s, or nothing", c.Action, Recoveries())
	}
	g.Health.Recovery = c.Action
	s.emit(Event{GPU: i, Type: nvml.EventTypeGpuRecoveryAction, Data: uint64(action)})
	return Result{}, nil
}

// RemapRows replaces rows of memory: the counts are added, the rest is set.
type RemapRows struct {
	GPU string `json:"gpu"`
	Rows
}

// Name implements Command.
func (*RemapRows) Name() string { return "remap" }

func (c *RemapRows) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case architectures[m.profile.GPU.Architecture] < nvml.DEVICE_ARCH_AMPERE:
		return Result{}, fmt.Errorf("gpu: %q: GPUs before Ampere have no spare rows", c.GPU)
	case c.Corrected < 0:
		return Result{}, fmt.Errorf("corrected: %d: want 0 or more", c.Corrected)
	case c.Uncorrected < 0:
		return Result{}, fmt.Errorf("uncorrected: %d: want 0 or more", c.Uncorrected)
	}
	rows := &g.Health.Rows
	rows.Corrected += c.Corrected
	rows.Uncorrected += c.Uncorrected
	rows.Pending, rows.Failed = c.Pending, c.Failed
	return Result{}, nil
}
