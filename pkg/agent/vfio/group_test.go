// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio_test

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/vfio"
)

const gpu = "0000:1b:00.0"

// bus is a tree with PCI functions: "address class vendor driver", all of them in the IOMMU group of that number. Without a number there
// is no IOMMU.
func bus(group string, functions ...string) fstest.MapFS {
	tree := fstest.MapFS{"bus/pci/drivers/vfio-pci/bind": {}}
	link := func(name, target string) {
		tree[name] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte(strings.Repeat("../", strings.Count(name, "/")) + target)}
	}
	for _, function := range functions {
		parts := strings.Split(function, " ")
		folder := "devices/pci0000:15/" + parts[0]
		tree[folder+"/class"] = &fstest.MapFile{Data: []byte(parts[1] + "\n")}
		tree[folder+"/vendor"] = &fstest.MapFile{Data: []byte(parts[2] + "\n")}
		tree[folder+"/reset_method"] = &fstest.MapFile{Data: []byte("flr bus\n")}
		tree[folder+"/driver_override"] = &fstest.MapFile{Data: []byte("(null)\n")}
		link("bus/pci/devices/"+parts[0], folder)
		if parts[3] != "-" {
			tree["bus/pci/drivers/"+parts[3]+"/bind"] = &fstest.MapFile{}
			link(folder+"/driver", "bus/pci/drivers/"+parts[3])
		}
		if group != "" {
			link(folder+"/iommu_group", "kernel/iommu_groups/"+group)
			link("kernel/iommu_groups/"+group+"/devices/"+parts[0], folder)
		}
	}
	return tree
}

func without(tree fstest.MapFS, name string) fstest.MapFS {
	delete(tree, name)
	return tree
}

func with(tree fstest.MapFS, name, content string) fstest.MapFS {
	tree[name] = &fstest.MapFile{Data: []byte(content)}
	return tree
}

func TestOnlyAGroupThatIsOneCardIsPassedThrough(t *testing.T) {
	const (
		card  = gpu + " 0x030200 0x10de nvidia"
		sound = "0000:1b:00.1 0x040300 0x10de snd_hda_intel"
	)
	tests := map[string]struct {
		tree fstest.MapFS
		// want has address=driver; refused is a part of the error.
		want    string
		refused string
	}{
		"a GPU alone":               {tree: bus("12", card), want: gpu + "=nvidia"},
		"with sound":                {tree: bus("12", card, sound), want: gpu + "=nvidia 0000:1b:00.1=snd_hda_intel"},
		"behind a bridge":           {tree: bus("12", "0000:15:01.0 0x060400 0x8086 pcieport", card), want: gpu + "=nvidia"},
		"with an unused ISA bridge": {tree: bus("12", "0000:15:02.0 0x060100 0x8086 -", card), want: gpu + "=nvidia"},
		"with a used ISA bridge":    {tree: bus("12", "0000:15:02.0 0x060100 0x8086 lpc_ich", card), refused: `0000:15:02.0 (class 0x060100, driver "lpc_ich")`},
		"without a driver":          {tree: bus("12", gpu+" 0x030200 0x10de -"), want: gpu + "="},
		"with a network card":       {tree: bus("12", card, "0000:1c:00.0 0x020000 0x15b3 mlx5_core"), refused: "IOMMU group 12 also has 0000:1c:00.0"},
		"with an unused NVMe disk":  {tree: bus("12", card, "0000:1c:00.0 0x010802 0x144d -"), refused: "not of the same card"},
		"with another GPU":          {tree: bus("12", card, "0000:1c:00.0 0x030200 0x10de vfio-pci"), refused: "0000:1c:00.0"},
		"without an IOMMU":          {tree: bus("", card), refused: "the IOMMU is off"},
		"without vfio-pci":          {tree: without(bus("12", card), "bus/pci/drivers/vfio-pci/bind"), refused: "modprobe vfio-pci"},
		"with virtual functions":    {tree: with(with(bus("12", card), "devices/pci0000:15/"+gpu+"/virtfn0", ""), "devices/pci0000:15/"+gpu+"/virtfn1", ""), refused: "2 virtual functions"},
		"that could have some":      {tree: with(bus("12", card), "devices/pci0000:15/"+gpu+"/sriov_numvfs", "0\n"), want: gpu + "=nvidia"},
		"without a way to reset it": {tree: without(bus("12", card), "devices/pci0000:15/"+gpu+"/reset_method"), refused: "no way to reset"},
		"with all of them off":      {tree: with(bus("12", card), "devices/pci0000:15/"+gpu+"/reset_method", "\n"), refused: "no way to reset"},
		"with an older kernel": {
			tree: with(without(bus("12", card), "devices/pci0000:15/"+gpu+"/reset_method"), "devices/pci0000:15/"+gpu+"/reset", ""), want: gpu + "=nvidia",
		},
		"that is not there": {tree: bus("12", sound), refused: "no PCI function " + gpu},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			group, err := vfio.GroupOf(test.tree, gpu)
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("error %v, want one with %q", err, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range group.Functions {
				got = append(got, f.Address+"="+f.Driver)
			}
			if diff := cmp.Diff(test.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("functions (-want +got):\n%s", diff)
			}
			if group.Node() != "/dev/vfio/12" {
				t.Errorf("node %s", group.Node())
			}
		})
	}
}

func TestGPUsAreTheDisplayControllersOfNVIDIA(t *testing.T) {
	tree := bus("12", gpu+" 0x030200 0x10de vfio-pci", "0000:1b:00.1 0x040300 0x10de -", "0000:02:00.0 0x030000 0x1a03 ast", "0000:43:00.0 0x030000 0x10de nvidia")
	// An NVSwitch is NVIDIA's, and no GPU.
	for name, file := range bus("13", "0000:05:00.0 0x068000 0x10de nvidia-nvswitch") {
		tree[name] = file
	}
	found, err := vfio.GPUs(tree)
	if err != nil {
		t.Fatal(err)
	}
	want := []vfio.Function{
		{Address: gpu, Class: "0x030200", Vendor: "0x10de", Driver: "vfio-pci"},
		{Address: "0000:43:00.0", Class: "0x030000", Vendor: "0x10de", Driver: "nvidia"},
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestAFolderIsSeenAsTheKernelIs: reads go through the links, and a write reaches the file behind them, whole and in place.
func TestAFolderIsSeenAsTheKernelIs(t *testing.T) {
	root := t.TempDir()
	if err := os.CopyFS(root, bus("12", gpu+" 0x030200 0x10de nvidia")); err != nil {
		t.Fatal(err)
	}
	sysfs := vfio.Dir(root)
	group, err := vfio.GroupOf(sysfs, gpu)
	if err != nil || len(group.Functions) != 1 || group.Functions[0].Driver != "nvidia" {
		t.Fatalf("group %+v, %v", group, err)
	}
	real := root + "/devices/pci0000:15/" + gpu + "/driver_override"
	if err := os.Chmod(real, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := sysfs.Write("bus/pci/devices/"+gpu+"/driver_override", "vfio-pci\n"); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(real); err != nil || string(data) != "vfio-pci\n" {
		t.Errorf("the file has %q, %v", data, err)
	}
	if override, err := vfio.NewBinder(sysfs).Override(t.Context(), gpu); err != nil || override != "vfio-pci" {
		t.Errorf("override %q, %v", override, err)
	}
	if err := sysfs.Write("bus/pci/devices/"+gpu+"/driver/unbind", gpu); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, err := os.Stat(root + "/bus/pci/drivers/nvidia/unbind"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a write has made a file")
	}
	if err := sysfs.Write("../etc/x", "1"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("a path out of the tree: %v", err)
	}
}

// counting counts what is read of PCI configurations.
type counting struct {
	fstest.MapFS
	read int
}

type countedFile struct {
	fs.File
	read *int
}

func (f countedFile) Read(data []byte) (int, error) {
	n, err := f.File.Read(data)
	*f.read += n
	return n, err
}

func (c *counting) Open(name string) (fs.File, error) {
	file, err := c.MapFS.Open(name)
	if strings.HasSuffix(name, "/config") {
		file = countedFile{file, &c.read}
	}
	return file, err
}

func (c *counting) ReadFile(name string) ([]byte, error) {
	data, err := c.MapFS.ReadFile(name)
	if strings.HasSuffix(name, "/config") {
		c.read += len(data)
	}
	return data, err
}

// TestAFunctionIsGoneWhenTheBusSaysSo: for a GPU that is lost pods are moved, so what cannot be read proves nothing. And no more is read than who it is.
func TestAFunctionIsGoneWhenTheBusSaysSo(t *testing.T) {
	const card = gpu + " 0x030200 0x10de nvidia"
	config := func(content string) fstest.MapFS {
		return with(bus("12", card), "devices/pci0000:15/"+gpu+"/config", content)
	}
	for name, tc := range map[string]struct {
		tree fstest.MapFS
		want bool
	}{
		"it answers":                 {tree: config("\xde\x10\x30\x23" + strings.Repeat("\x00", 4092))},
		"nobody answers":             {tree: config(strings.Repeat("\xff", 4096)), want: true},
		"half of an answer":          {tree: config("\xff\xff")},
		"it is not on the bus":       {tree: bus("12", "0000:43:00.0 0x030000 0x10de nvidia"), want: true},
		"it has no configuration":    {tree: bus("12", card)},
		"there is no bus to look at": {tree: fstest.MapFS{}},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := &counting{MapFS: tc.tree}
			if got := vfio.Gone(fsys, gpu); got != tc.want {
				t.Errorf("gone: %v, want %v", got, tc.want)
			}
			if fsys.read > 4 {
				t.Errorf("%d bytes of the configuration were read, want 4", fsys.read)
			}
		})
	}
}
