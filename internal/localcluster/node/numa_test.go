// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCPUsAreDealtOutToNUMANodes(t *testing.T) {
	for name, tc := range map[string]struct {
		cpus  []string
		count int
		want  [][]string
	}{
		"two each":                         {[]string{"cpu0", "cpu1", "cpu10", "cpu2"}, 2, [][]string{{"cpu0", "cpu1"}, {"cpu10", "cpu2"}}},
		"one is left":                      {[]string{"cpu0", "cpu1", "cpu2"}, 2, [][]string{{"cpu0"}, {"cpu1", "cpu2"}}},
		"fewer than nodes":                 {[]string{"cpu0"}, 2, [][]string{nil, {"cpu0"}}},
		"folders that are of no CPU":       {[]string{"cpu0", "cpu1", "cpufreq", "cpuidle", "smt"}, 2, [][]string{{"cpu0"}, {"cpu1"}}},
		"as many nodes as the machine has": {[]string{"cpu0", "cpu1"}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			system, l := t.TempDir(), layout{dir: t.TempDir()}
			for _, cpu := range tc.cpus {
				if err := os.MkdirAll(filepath.Join(system, "cpu", cpu, "topology"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			binds, err := showNUMANodes(l, system, tc.count)
			if err != nil {
				t.Fatal(err)
			}
			if tc.count == 0 {
				if len(binds) > 0 {
					t.Errorf("mounts %v, want none", binds)
				}
				return
			}
			if len(binds) != 1 || binds[0].Target != filepath.Join(system, "node") {
				t.Fatalf("mounts %v, want one over the kernel's NUMA nodes", binds)
			}
			var got [][]string
			for i := range tc.count {
				// As cadvisor looks for them.
				cpus, err := filepath.Glob(filepath.Join(binds[0].Source, "node"+string(rune('0'+i)), "cpu*[0-9]", "topology"))
				if err != nil {
					t.Fatal(err)
				}
				var names []string
				for _, cpu := range cpus {
					names = append(names, filepath.Base(filepath.Dir(cpu)))
				}
				slices.Sort(names)
				got = append(got, names)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("CPUs by NUMA node (-want +got):\n%s", diff)
			}
		})
	}
}
