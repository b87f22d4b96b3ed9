// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// machineWith returns an opened library of one GPU of the product, with MIG enabled.
func machineWith(t *testing.T, table string) (*Library, *device) {
	t.Helper()
	base, memory := "dgx-h100", map[string]uint64{
		"a30-24gb": 24576, "a100-40gb": 40960, "a100-80gb": 81920, "h100-80gb": 81559, "h200-141gb": 143771,
		"b200-180gb": 183359, "gb200-186gb": 189471, "gb300-278gb": 284208,
	}[table]
	if migTables[table].resetToSwitch {
		base = "dgx-a100"
	}
	p, err := LoadProfile(base)
	if err != nil {
		t.Fatal(err)
	}
	p.GPUs, p.GPU.MemoryMiB = p.GPUs[:2], memory
	p.GPU.MIG = &MIG{Enabled: true, MaxDevices: int(migTables[table].whole().compute), Table: table}
	if err := p.validate(); err != nil {
		t.Fatal(err)
	}
	lib := open(t, NewFromProfile(p, "node-a"))
	return lib, lib.devices[0]
}

// The tables as nvidia-smi mig -lgip and -lgipp print them: name, ID, instances,
// SMs, engines, and where an instance may start.
func TestProfilesAndPlacementsAreTheProducts(t *testing.T) {
	const sevens, pairs = "{0,1,2,3,4,5,6}:1", "{0,2,4,6}:2"
	tests := map[string][]string{
		"a30-24gb": {
			"1g.6gb 14 ×4 14 SM CE1 DEC0 JPG0 OFA0 {0,1,2,3}:1", "1g.6gb+me 21 ×1 14 SM CE1 DEC1 JPG1 OFA1 {0,1,2,3}:1",
			"2g.12gb 5 ×2 28 SM CE2 DEC2 JPG0 OFA0 {0,2}:2", "2g.12gb+me 6 ×1 28 SM CE2 DEC2 JPG1 OFA1 {0,2}:2",
			"4g.24gb 0 ×1 56 SM CE4 DEC4 JPG1 OFA1 {0}:4",
		},
		"a100-40gb": {
			"1g.5gb 19 ×7 14 SM CE1 DEC0 JPG0 OFA0 " + sevens, "1g.5gb+me 20 ×1 14 SM CE1 DEC1 JPG1 OFA1 " + sevens,
			"1g.10gb 15 ×4 14 SM CE1 DEC1 JPG0 OFA0 " + pairs, "2g.10gb 14 ×3 28 SM CE2 DEC1 JPG0 OFA0 {0,2,4}:2",
			"3g.20gb 9 ×2 42 SM CE3 DEC2 JPG0 OFA0 {0,4}:4", "4g.20gb 5 ×1 56 SM CE4 DEC2 JPG0 OFA0 {0}:4",
			"7g.40gb 0 ×1 98 SM CE7 DEC5 JPG1 OFA1 {0}:8",
		},
		"h100-80gb": {
			"1g.10gb 19 ×7 16 SM CE1 DEC1 JPG1 OFA0 " + sevens, "1g.10gb+me 20 ×1 16 SM CE1 DEC1 JPG1 OFA1 " + sevens,
			"1g.20gb 15 ×4 26 SM CE1 DEC1 JPG1 OFA0 " + pairs, "2g.20gb 14 ×3 32 SM CE2 DEC2 JPG2 OFA0 {0,2,4}:2",
			"3g.40gb 9 ×2 60 SM CE3 DEC3 JPG3 OFA0 {0,4}:4", "4g.40gb 5 ×1 64 SM CE4 DEC4 JPG4 OFA0 {0}:4",
			"7g.80gb 0 ×1 132 SM CE8 DEC7 JPG7 OFA1 {0}:8",
		},
		"b200-180gb": {
			"1g.23gb 19 ×7 18 SM CE2 DEC1 JPG1 OFA0 " + sevens, "1g.23gb+me 20 ×1 18 SM CE2 DEC1 JPG1 OFA1 " + sevens,
			"1g.45gb 15 ×4 18 SM CE2 DEC1 JPG1 OFA0 " + pairs, "2g.45gb 14 ×3 36 SM CE3 DEC1 JPG1 OFA0 {0,2,4}:2",
			"3g.90gb 9 ×2 70 SM CE6 DEC1 JPG1 OFA0 {0,4}:4", "4g.90gb 5 ×1 72 SM CE8 DEC1 JPG1 OFA0 {0}:4",
			"7g.180gb 0 ×1 148 SM CE16 DEC1 JPG1 OFA1 {0}:8",
		},
	}
	for table, want := range tests {
		t.Run(table, func(t *testing.T) {
			_, d := machineWith(t, table)
			var got []string
			for number := range nvml.GPU_INSTANCE_PROFILE_COUNT {
				info, ret := d.GetGpuInstanceProfileInfo(number)
				if ret == nvml.ERROR_NOT_SUPPORTED {
					continue
				}
				placements, ret := d.GetGpuInstancePossiblePlacements(&info)
				if ret != nvml.SUCCESS {
					t.Fatal(ret)
				}
				var starts []string
				for _, p := range placements {
					starts = append(starts, fmt.Sprint(p.Start))
				}
				got = append(got, fmt.Sprintf("%s %d ×%d %d SM CE%d DEC%d JPG%d OFA%d {%s}:%d", migTables[table].byID(info.Id).name, info.Id,
					info.InstanceCount, info.MultiprocessorCount, info.CopyEngineCount, info.DecoderCount, info.JpegCount, info.OfaCount,
					strings.Join(starts, ","), placements[0].Size))
			}
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A profile's name is not stored in NVML: its readers make it from the share of
// the memory, in eighths, of the GPU's size in whole GiB.
func TestProfileNamesFollowFromTheMemory(t *testing.T) {
	for table := range maps.Keys(migTables) {
		lib, _ := machineWith(t, table)
		total := float64(lib.profile.GPU.MemoryMiB)
		for _, p := range migTables[table].profiles {
			share := math.Ceil(float64(p.memoryMiB)/total*8) / 8
			name := fmt.Sprintf("%dg.%dgb", p.compute, int(math.Round(share*math.Ceil(total/1024))))
			if strings.TrimSuffix(p.name, "+me") != name {
				t.Errorf("%s: %s with %d of %.0f MiB: readers will call it %s", table, p.name, p.memoryMiB, total, name)
			}
			if got, want := uint32(share*8), p.size*8/migTables[table].slices; got != want {
				t.Errorf("%s: %s has %d eighths of the memory and takes %d", table, p.name, got, want)
			}
		}
	}
}

// TestMixesOfInstances: what fits beside what, in the order in which it is asked for.
func TestMixesOfInstances(t *testing.T) {
	tests := map[string]struct {
		table string
		mix   string // profile@start, or profile, each followed by ! if refused
	}{
		"seven of the smallest":                 {"a100-40gb", "1g.5gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb!"},
		"three pairs and a single":              {"a100-40gb", "2g.10gb@0 2g.10gb@2 2g.10gb@4 1g.5gb@6 1g.5gb!"},
		"two threes take all the memory":        {"a100-40gb", "3g.20gb 3g.20gb 1g.5gb!"},
		"four and three":                        {"a100-40gb", "4g.20gb 3g.20gb 1g.5gb!"},
		"three and four, three in four's place": {"a100-40gb", "3g.20gb@0 4g.20gb!"},
		"a three chosen leaves room for a four": {"a100-40gb", "3g.20gb 4g.20gb"},
		"three at 0 and three singles":          {"a100-40gb", "3g.20gb@0 1g.5gb@4 1g.5gb@5 1g.5gb@6 1g.5gb!"},
		"three at 4 and four singles":           {"a100-40gb", "3g.20gb@4 1g.5gb@0 1g.5gb@1 1g.5gb@2 1g.5gb@3 1g.5gb!"},
		"a whole one alone":                     {"a100-40gb", "7g.40gb 1g.5gb!"},
		"none whole beside a single":            {"a100-40gb", "1g.5gb 7g.40gb!"},
		"four with double memory":               {"a100-40gb", "1g.10gb 1g.10gb 1g.10gb 1g.10gb 1g.5gb!"},
		"one with media extensions":             {"a100-40gb", "1g.5gb+me 1g.5gb+me! 1g.5gb"},
		"singles keep off the pairs":            {"a100-40gb", "1g.5gb 2g.10gb 2g.10gb 2g.10gb"},
		"overlap with a pair":                   {"h100-80gb", "2g.20gb@2 1g.10gb@3! 1g.10gb@4 2g.20gb@4!"},
		"same on Hopper":                        {"h100-80gb", "3g.40gb@4 1g.20gb@6! 1g.20gb@0 2g.20gb@2 1g.10gb!"},
		"same on Blackwell":                     {"b200-180gb", "4g.90gb 2g.45gb 1g.45gb 1g.23gb!"},
		"A30 in quarters":                       {"a30-24gb", "2g.12gb@0 1g.6gb@2 1g.6gb@3 1g.6gb!"},
		"A30 has one media extension":           {"a30-24gb", "2g.12gb+me 1g.6gb+me! 2g.12gb"},
		"A30 whole":                             {"a30-24gb", "4g.24gb 1g.6gb!"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, d := machineWith(t, test.table)
			for _, word := range strings.Fields(test.mix) {
				profile, start, placed := strings.Cut(strings.TrimSuffix(word, "!"), "@")
				p := migTables[test.table].byName(profile)
				info := p.info()
				before, _ := d.GetGpuInstanceRemainingCapacity(&info)
				var ret nvml.Return
				if placed {
					at := nvml.GpuInstancePlacement{Size: p.size}
					fmt.Sscan(start, &at.Start)
					_, ret = d.CreateGpuInstanceWithPlacement(&info, &at)
				} else {
					_, ret = d.CreateGpuInstance(&info)
					if fits := before > 0; fits != (ret == nvml.SUCCESS) {
						t.Errorf("%s: remaining capacity %d, and creation answers %v", word, before, ret)
					}
				}
				want := nvml.SUCCESS
				if strings.HasSuffix(word, "!") {
					want = nvml.ERROR_INSUFFICIENT_RESOURCES
				}
				if ret != want {
					t.Fatalf("%s: %v, want %v", word, ret, want)
				}
			}
		})
	}
}

func TestComputeInstancesShareAGPUInstance(t *testing.T) {
	tests := map[string]struct {
		profile string
		mix     string // number of slices, followed by ! if refused
	}{
		"a single has itself":        {"1g.10gb", "1 1!"},
		"a pair in halves":           {"2g.20gb", "1 1 1!"},
		"a three":                    {"3g.40gb", "2 1 1!"},
		"a three whole":              {"3g.40gb", "3 1!"},
		"a four":                     {"4g.40gb", "2 2 1!"},
		"a seven":                    {"7g.80gb", "3 3 1 1!"},
		"a seven in pairs":           {"7g.80gb", "2 2 2 1 1!"},
		"no pairs where none starts": {"3g.40gb", "1 2!"},
	}
	numbers := map[string]int{"1": 0, "2": 1, "3": 2, "4": 3, "7": 4}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, d := machineWith(t, "h100-80gb")
			info := migTables["h100-80gb"].byName(test.profile).info()
			gi, ret := d.CreateGpuInstance(&info)
			if ret != nvml.SUCCESS {
				t.Fatal(ret)
			}
			for _, word := range strings.Fields(test.mix) {
				compute, ret := gi.GetComputeInstanceProfileInfo(numbers[strings.TrimSuffix(word, "!")], nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
				if ret != nvml.SUCCESS {
					t.Fatal(ret)
				}
				left, _ := gi.GetComputeInstanceRemainingCapacity(&compute)
				_, ret = gi.CreateComputeInstance(&compute)
				want := nvml.SUCCESS
				if strings.HasSuffix(word, "!") {
					want = nvml.ERROR_INSUFFICIENT_RESOURCES
				}
				if ret != want || (left > 0) != (ret == nvml.SUCCESS) {
					t.Errorf("%s: %v with a capacity of %d, want %v", word, ret, left, want)
				}
			}
		})
	}
}
