// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import "fmt"

// Classes of XIDs. What an XID means stands in NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors).
var (
	// applicationXIDs are errors of what runs on the GPU: a bad access, an engine reset on its behalf. The next process is not concerned.
	applicationXIDs = map[uint64]bool{13: true, 31: true, 43: true, 45: true, 68: true, 109: true}
	// recordXIDs tell that the driver has dealt with memory errors; what is left to be done shows in the readings: remapped rows (63),
	// a high rate of corrected errors (92), an uncorrected one that ended only the process that met it (94).
	recordXIDs = map[uint64]bool{63: true, 92: true, 94: true}
	// wholeXIDs are about parts of the GPU that its MIG devices share, whichever of them NVML names: the microcontrollers (61, 62, 119, 120),
	// the list of rows to be replaced (64), the links (74), and an error of the memory that was not contained (95).
	wholeXIDs = map[uint64]bool{61: true, 62: true, 64: true, 74: true, 95: true, 119: true, 120: true}
	// memoryXIDs are errors of the memory that could not be corrected, which NVML's counter also counts. MIG devices have memory of their own.
	memoryXIDs = map[uint64]bool{48: true, 94: true, 140: true}
)

const (
	xidDoubleBit = 48
	// xidLost: the GPU has fallen off the bus. The question that every event puts finds out whether it has.
	xidLost = 79
	// xidRecovery: the recovery action has changed, also back to none. The same question reads it.
	xidRecovery = 154
)

var xidTexts = map[uint64]string{
	48:  "an error in the memory could not be corrected",
	61:  "the GPU's microcontroller stopped",
	62:  "the GPU's microcontroller halted",
	64:  "a bad row of the memory could not be recorded for replacement",
	74:  "an NVLink has failed",
	95:  "an error in the memory may have reached other processes",
	119: "the GPU's system processor does not answer",
	120: "the GPU's system processor has failed",
	140: "an error in the memory could not be corrected or recovered from",
}

// faultOfXID returns nil for an XID that says nothing about the GPU's own health.
func faultOfXID(code uint64) *Fault {
	switch {
	case applicationXIDs[code], recordXIDs[code], code == xidLost, code == xidRecovery:
		return nil
	}
	text, ok := xidTexts[code]
	if !ok {
		text = "an error that is not known to be an application's"
	}
	return &Fault{Reason: XID, Value: fmt.Sprint(code), Message: fmt.Sprintf("XID %d: %s", code, text)}
}
