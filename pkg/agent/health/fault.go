// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// Reason says what is wrong with a GPU. It is part of taints' keys and a label of metrics.
type Reason string

// The reasons. Level reasons are judged anew by each answer of NVML; XID is latched, because an XID is told once.
const (
	// Lost: the GPU has fallen off the bus, or NVML does not know it any more.
	Lost Reason = "gpu-lost"
	// Hung: a call about the GPU does not return.
	Hung Reason = "hung"
	// NoAnswer: NVML answers with an error.
	NoAnswer Reason = "no-answer"
	// NoDriver: the driver is not loaded, on the whole node.
	NoDriver Reason = "no-driver"
	// XID: the driver reported an error that is not the application's.
	XID Reason = "xid"
	// ECC: memory errors that could not be corrected, since the driver was loaded.
	ECC Reason = "ecc-uncorrected"
	// RowFailed: a bad row of the memory could not be replaced, because no spare is left.
	RowFailed Reason = "row-remap-failed"
	// RowPending: a bad row will be replaced with the next reset. It is not used until then.
	RowPending Reason = "row-remap-pending"
	// Temperature: so hot that the GPU slows down.
	Temperature Reason = "temperature"
	// PCIe: the link has fewer lanes than GPU and slot have.
	PCIe Reason = "pcie-width"
	// Power: the power supply makes the GPU slow down.
	Power Reason = "power-brake"
	// Recovery: the driver says that the GPU must be reset, or the node rebooted.
	Recovery Reason = "recovery-action"
	// MemoryLeft: memory is in use while nobody uses the GPU.
	MemoryLeft Reason = "memory-left"
)

// Severity says what follows from a fault.
type Severity int

// The severities, the worst last.
const (
	// Notice: nothing but that it is told.
	Notice Severity = iota
	// Avoid: no new claim gets the GPU.
	Avoid
	// Evict: pods that use the GPU are moved, too.
	Evict
)

// rule says how a reason is treated.
type rule struct {
	severity Severity
	// most is how severe a policy can make it, if that is more.
	most Severity
	// permanent faults stay until somebody acts: resets the GPU, reboots the node, replaces the hardware.
	permanent bool
	// set is how long a fault must be seen before it counts, clear how long it must not have been seen before it is over.
	set, clear time.Duration
}

// rules. What NVML states is believed at once, but that a GPU is lost, for which pods are moved, must be seen in two polls. What is
// measured must last, because load changes it: a busy driver takes 10 seconds and more for an answer, and is not hung. The XID's quiet time
// is long, because the next job may run into the same error.
var rules = map[Reason]rule{
	Lost:        {severity: Evict, permanent: true, set: PollInterval / 2, clear: 30 * time.Second},
	Hung:        {severity: Avoid, set: 30 * time.Second, clear: 30 * time.Second},
	NoAnswer:    {severity: Avoid, set: 20 * time.Second, clear: 20 * time.Second},
	NoDriver:    {severity: Avoid, set: 30 * time.Second},
	XID:         {severity: Avoid, clear: 10 * time.Minute},
	ECC:         {severity: Avoid, permanent: true, clear: 20 * time.Second},
	RowFailed:   {severity: Avoid, permanent: true, clear: 20 * time.Second},
	RowPending:  {severity: Notice},
	Temperature: {severity: Avoid, set: 30 * time.Second, clear: time.Minute},
	PCIe:        {severity: Avoid, permanent: true, set: 30 * time.Second, clear: 30 * time.Second},
	Power:       {severity: Avoid, set: 30 * time.Second, clear: time.Minute},
	Recovery:    {severity: Avoid, permanent: true, clear: 20 * time.Second},
	MemoryLeft:  {severity: Notice, most: Avoid, permanent: true, set: LookInterval / 2},
}

// Reasons are all that there are, in no order.
func Reasons() []Reason { return slices.Collect(maps.Keys(rules)) }

// Fault is one thing that is wrong with a GPU, or with one MIG device of it.
type Fault struct {
	Reason Reason `json:"reason"`
	// Value is the reason's detail in a word, the XID's number for one; a valid label value.
	Value string `json:"value,omitempty"`
	// Message is for people. It does not change while the fault lasts: the kubelet takes another message for another state.
	Message string `json:"message"`
	// Instance is nil for a fault of the whole GPU.
	Instance *nvml.Instance `json:"instance,omitempty"`
	Since    time.Time      `json:"since"`
	// Gone is when it began not to be seen any more, zero while it is. It counts towards its end over restarts of the agent, too.
	Gone time.Time `json:"gone,omitzero"`

	// seen is when it began to be seen.
	seen time.Time
	// softer is how much less severe it is than its rule has it.
	softer Severity
}

// Severity of the fault.
func (f *Fault) Severity() Severity { return rules[f.Reason].severity - f.softer }

// Permanent faults do not heal by themselves.
func (f *Fault) Permanent() bool { return rules[f.Reason].permanent }

// counts tells whether it has lasted long enough.
func (f *Fault) counts() bool { return !f.Since.IsZero() }

func (f *Fault) same(g *Fault) bool {
	return f.Reason == g.Reason && (f.Instance == nil) == (g.Instance == nil) && (f.Instance == nil || *f.Instance == *g.Instance)
}

// compare puts the worst first, and otherwise has one order.
func compare(a, b Fault) int {
	return cmp.Or(cmp.Compare(b.Severity(), a.Severity()), cmp.Compare(a.Reason, b.Reason), compareInstances(a.Instance, b.Instance))
}

func compareInstances(a, b *nvml.Instance) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Compute, b.Compute))
}
