// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// migTable is how one GPU product can be partitioned, as nvidia-smi mig -lgip,
// -lgipp and -lcip print it.
//
// Sources: "Supported MIG Profiles" in NVIDIA's MIG user guide (names, engines,
// numbers of instances), and outputs of nvidia-smi on such GPUs (profile IDs,
// placements, sizes). README.md says which numbers are assumed.
type migTable struct {
	// slices of memory; a placement is a range of them.
	slices uint32
	// resetToSwitch: the mode changes with a GPU reset only, and the InfoROM
	// keeps it over reboots. From Hopper on it changes at once and is forgotten.
	resetToSwitch bool
	profiles      []giProfile
}

// giProfile is one kind of GPU instance.
type giProfile struct {
	// number is NVML's GPU_INSTANCE_PROFILE_…, by which the profile is looked up.
	number int
	// id is the driver's own, as in nvidia-smi: instances are created by it.
	id   uint32
	name string
	// compute slices, and the placements: memory slices from each start.
	compute, size uint32
	starts        []uint32
	// max is how many a GPU takes at once.
	max                        uint32
	sms, copies, dec, jpeg, fa uint32
	memoryMiB                  uint64
}

// shape is the part of a profile that products have in common.
type shape struct {
	number        int
	id            uint32
	compute, size uint32
	max           uint32
	starts        []uint32
}

// units is the part in which products differ.
type units struct {
	name                       string
	sms, copies, dec, jpeg, fa uint32
	memoryMiB                  uint64
}

// Seven compute slices over eight of memory: all but the A30.
var eighths = []shape{
	{nvml.GPU_INSTANCE_PROFILE_1_SLICE, 19, 1, 1, 7, []uint32{0, 1, 2, 3, 4, 5, 6}},
	{nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, 20, 1, 1, 1, []uint32{0, 1, 2, 3, 4, 5, 6}},
	{nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, 15, 1, 2, 4, []uint32{0, 2, 4, 6}},
	{nvml.GPU_INSTANCE_PROFILE_2_SLICE, 14, 2, 2, 3, []uint32{0, 2, 4}},
	{nvml.GPU_INSTANCE_PROFILE_3_SLICE, 9, 3, 4, 2, []uint32{0, 4}},
	{nvml.GPU_INSTANCE_PROFILE_4_SLICE, 5, 4, 4, 1, []uint32{0}},
	{nvml.GPU_INSTANCE_PROFILE_7_SLICE, 0, 7, 8, 1, []uint32{0}},
}

var quarters = []shape{
	{nvml.GPU_INSTANCE_PROFILE_1_SLICE, 14, 1, 1, 4, []uint32{0, 1, 2, 3}},
	{nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, 21, 1, 1, 1, []uint32{0, 1, 2, 3}},
	{nvml.GPU_INSTANCE_PROFILE_2_SLICE, 5, 2, 2, 2, []uint32{0, 2}},
	{nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1, 6, 2, 2, 1, []uint32{0, 2}},
	{nvml.GPU_INSTANCE_PROFILE_4_SLICE, 0, 4, 4, 1, []uint32{0}},
}

// migTables by the name that a profile gives in gpu.mig.table.
var migTables = map[string]*migTable{
	"a30-24gb": newMIGTable(4, true, quarters, []units{
		{"1g.6gb", 14, 1, 0, 0, 0, 5836},
		{"1g.6gb+me", 14, 1, 1, 1, 1, 5836},
		{"2g.12gb", 28, 2, 2, 0, 0, 11672},
		{"2g.12gb+me", 28, 2, 2, 1, 1, 11672},
		{"4g.24gb", 56, 4, 4, 1, 1, 23344},
	}),
	"a100-40gb": newMIGTable(8, true, eighths, []units{
		{"1g.5gb", 14, 1, 0, 0, 0, 4864},
		{"1g.5gb+me", 14, 1, 1, 1, 1, 4864},
		{"1g.10gb", 14, 1, 1, 0, 0, 9856},
		{"2g.10gb", 28, 2, 1, 0, 0, 9856},
		{"3g.20gb", 42, 3, 2, 0, 0, 19968},
		{"4g.20gb", 56, 4, 2, 0, 0, 19968},
		{"7g.40gb", 98, 7, 5, 1, 1, 40192},
	}),
	"a100-80gb": newMIGTable(8, true, eighths, []units{
		{"1g.10gb", 14, 1, 0, 0, 0, 9728},
		{"1g.10gb+me", 14, 1, 1, 1, 1, 9728},
		{"1g.20gb", 14, 1, 1, 0, 0, 19968},
		{"2g.20gb", 28, 2, 1, 0, 0, 19968},
		{"3g.40gb", 42, 3, 2, 0, 0, 40192},
		{"4g.40gb", 56, 4, 2, 0, 0, 40192},
		{"7g.80gb", 98, 7, 5, 1, 1, 80384},
	}),
	"h100-80gb": newMIGTable(8, false, eighths, []units{
		{"1g.10gb", 16, 1, 1, 1, 0, 9984},
		{"1g.10gb+me", 16, 1, 1, 1, 1, 9984},
		{"1g.20gb", 26, 1, 1, 1, 0, 20096},
		{"2g.20gb", 32, 2, 2, 2, 0, 20096},
		{"3g.40gb", 60, 3, 3, 3, 0, 40448},
		{"4g.40gb", 64, 4, 4, 4, 0, 40448},
		{"7g.80gb", 132, 8, 7, 7, 1, 81152},
	}),
	"h200-141gb": newMIGTable(8, false, eighths, []units{
		{"1g.18gb", 16, 1, 1, 1, 0, 16896},
		{"1g.18gb+me", 16, 1, 1, 1, 1, 16896},
		{"1g.35gb", 26, 1, 1, 1, 0, 33920},
		{"2g.35gb", 32, 2, 2, 2, 0, 33920},
		{"3g.71gb", 60, 3, 3, 3, 0, 70656},
		{"4g.71gb", 64, 4, 4, 4, 0, 70656},
		{"7g.141gb", 132, 8, 7, 7, 1, 143104},
	}),
	"b200-180gb": newMIGTable(8, false, eighths, []units{
		{"1g.23gb", 18, 2, 1, 1, 0, 22528},
		{"1g.23gb+me", 18, 2, 1, 1, 1, 22528},
		{"1g.45gb", 18, 2, 1, 1, 0, 45440},
		{"2g.45gb", 36, 3, 1, 1, 0, 45440},
		{"3g.90gb", 70, 6, 1, 1, 0, 91136},
		{"4g.90gb", 72, 8, 1, 1, 0, 91136},
		{"7g.180gb", 148, 16, 1, 1, 1, 182528},
	}),
	"gb200-186gb": newMIGTable(8, false, eighths, []units{
		{"1g.23gb", 18, 2, 1, 1, 0, 23296},
		{"1g.23gb+me", 18, 2, 1, 1, 1, 23296},
		{"1g.47gb", 18, 2, 1, 1, 0, 47104},
		{"2g.47gb", 36, 3, 1, 1, 0, 47104},
		{"3g.93gb", 72, 6, 1, 1, 0, 94464},
		{"4g.93gb", 72, 8, 1, 1, 0, 94464},
		{"7g.186gb", 152, 16, 1, 1, 1, 188672},
	}),
	"gb300-278gb": newMIGTable(8, false, eighths, []units{
		{"1g.35gb", 18, 2, 1, 1, 0, 35328},
		{"1g.35gb+me", 18, 2, 1, 1, 1, 35328},
		{"1g.70gb", 18, 2, 1, 1, 0, 70912},
		{"2g.70gb", 36, 3, 1, 1, 0, 70912},
		{"3g.139gb", 72, 6, 1, 1, 0, 142080},
		{"4g.139gb", 72, 8, 1, 1, 0, 142080},
		{"7g.278gb", 152, 16, 1, 1, 1, 283136},
	}),
}

func newMIGTable(slices uint32, resetToSwitch bool, shapes []shape, rows []units) *migTable {
	t := &migTable{slices: slices, resetToSwitch: resetToSwitch}
	for i, s := range shapes {
		u := rows[i]
		t.profiles = append(t.profiles, giProfile{
			number: s.number, id: s.id, name: u.name, compute: s.compute, size: s.size, starts: s.starts, max: s.max,
			sms: u.sms, copies: u.copies, dec: u.dec, jpeg: u.jpeg, fa: u.fa, memoryMiB: u.memoryMiB,
		})
	}
	return t
}

// profile returns the profile for which want holds, nil if there is none.
func (t *migTable) profile(want func(*giProfile) bool) *giProfile {
	for i := range t.profiles {
		if want(&t.profiles[i]) {
			return &t.profiles[i]
		}
	}
	return nil
}

func (t *migTable) byName(name string) *giProfile {
	return t.profile(func(p *giProfile) bool { return p.name == name })
}

func (t *migTable) byID(id uint32) *giProfile {
	return t.profile(func(p *giProfile) bool { return p.id == id })
}

func (t *migTable) byNumber(number int) *giProfile {
	return t.profile(func(p *giProfile) bool { return p.number == number })
}

// whole is the profile that takes all of the GPU.
func (t *migTable) whole() *giProfile {
	return t.profile(func(p *giProfile) bool { return p.size == t.slices })
}

// instanceID of a placement: the wider the placement, the lower its ID, so that
// no two placements that exist beside each other have one.
func (t *migTable) instanceID(start, size uint32) uint32 {
	return t.slices/size - 1 + start/size
}

func (p *giProfile) info() nvml.GpuInstanceProfileInfo {
	return nvml.GpuInstanceProfileInfo{
		Id: p.id, SliceCount: p.compute, InstanceCount: p.max, MultiprocessorCount: p.sms, CopyEngineCount: p.copies,
		DecoderCount: p.dec, JpegCount: p.jpeg, OfaCount: p.fa, MemorySizeMB: p.memoryMiB,
	}
}

// ciProfile is one kind of compute instance within a GPU instance.
type ciProfile struct {
	// number is NVML's COMPUTE_INSTANCE_PROFILE_…, and the driver's ID as well.
	number  int
	compute uint32
	sms     uint32
	starts  []uint32
}

// computeProfiles are those of a GPU instance: slices in powers of two from
// aligned starts, three from 0 and 4, and always the whole (nvidia-smi mig -lcip).
func (p *giProfile) computeProfiles() []ciProfile {
	var all []ciProfile
	perSlice := p.sms / p.compute
	add := func(number int, compute uint32, aligned uint32) {
		if compute > p.compute {
			return
		}
		c := ciProfile{number: number, compute: compute, sms: compute * perSlice}
		if compute == p.compute {
			c.sms = p.sms
		}
		for start := uint32(0); start+compute <= p.compute; start += aligned {
			c.starts = append(c.starts, start)
		}
		all = append(all, c)
	}
	add(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 1, 1)
	add(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 2, 2)
	if p.compute == 3 || p.compute == 7 {
		add(nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 3, 4)
	}
	if p.compute == 4 || p.compute == 7 {
		add(nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 4, 4)
	}
	if p.compute == 7 {
		add(nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 7, 8)
	}
	return all
}

func (p *giProfile) computeProfile(number int) *ciProfile {
	for _, c := range p.computeProfiles() {
		if c.number == number {
			return &c
		}
	}
	return nil
}

// info of a compute instance: engines belong to the GPU instance and are shared.
func (c *ciProfile) info(p *giProfile) nvml.ComputeInstanceProfileInfo {
	return nvml.ComputeInstanceProfileInfo{
		Id: uint32(c.number), SliceCount: c.compute, InstanceCount: uint32(len(c.starts)), MultiprocessorCount: c.sms,
		SharedCopyEngineCount: p.copies, SharedDecoderCount: p.dec, SharedJpegCount: p.jpeg, SharedOfaCount: p.fa,
	}
}
