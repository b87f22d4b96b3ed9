// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"io/fs"
	"os"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func TestSysfsHasWhatTheKernelSaysAboutEachGPU(t *testing.T) {
	type facts struct{ Link, NUMA, Vendor, Device, Class string }
	tests := map[string]struct {
		profile, address string
		want             facts
	}{
		"behind two switches": {"dgx-a100", "0000:90:00.0", facts{
			"../../../devices/pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:08.0/0000:8b:00.0/0000:8c:08.0/0000:90:00.0",
			"7\n", "0x10de\n", "0x20b2\n", "0x030200\n",
		}},
		"in a PCI domain of its own": {"gb200", "0019:01:00.0", facts{
			"../../../devices/pci0019:00/0019:00:00.0/0019:01:00.0", "1\n", "0x10de\n", "0x2941\n", "0x030200\n",
		}},
		"without a NUMA node": {"t4", "0000:00:1b.0", facts{
			"../../../devices/pci0000:00/0000:00:1b.0", "-1\n", "0x10de\n", "0x1eb8\n", "0x030200\n",
		}},
		"a bridge": {"gb200", "0019:00:00.0", facts{
			"../../../devices/pci0019:00/0019:00:00.0", "1\n", "", "", "0x060400\n",
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			tree := mustNew(t, test.profile).Sysfs()
			if err := os.CopyFS(folder, tree); err != nil {
				t.Fatal(err)
			}
			for where, sysfs := range map[string]fs.FS{"in memory": tree, "in a folder": os.DirFS(folder)} {
				got := facts{}
				link := "bus/pci/devices/" + test.address
				got.Link, _ = fs.ReadLink(sysfs, link)
				for file, field := range map[string]*string{
					"numa_node": &got.NUMA, "vendor": &got.Vendor, "device": &got.Device, "class": &got.Class,
				} {
					data, _ := fs.ReadFile(sysfs, link+"/"+file)
					*field = string(data)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", where, diff)
				}
			}
		})
	}
}

func TestSysfsIsAWellFormedTree(t *testing.T) {
	for _, profile := range Profiles() {
		lib := mustNew(t, profile)
		var links []string
		for _, d := range lib.devices {
			links = append(links, "bus/pci/devices/"+d.path.address.String())
		}
		if err := fstest.TestFS(lib.Sysfs(), links...); err != nil {
			t.Errorf("%s: %v", profile, err)
		}
	}
}
