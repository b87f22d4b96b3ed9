// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// The matrices that nvidia-smi topo -mp and topo -m print on such machines.
func TestTheTopologyMatrices(t *testing.T) {
	allNVLink := func(gpus int, word string) string {
		rows := make([]string, gpus)
		for i := range rows {
			cells := make([]string, gpus)
			for j := range cells {
				if cells[j] = word; i == j {
					cells[j] = "X"
				}
			}
			rows[i] = strings.Join(cells, " ")
		}
		return strings.Join(rows, "\n")
	}
	ownRoot := `
X NODE NODE NODE SYS SYS SYS SYS
NODE X NODE NODE SYS SYS SYS SYS
NODE NODE X NODE SYS SYS SYS SYS
NODE NODE NODE X SYS SYS SYS SYS
SYS SYS SYS SYS X NODE NODE NODE
SYS SYS SYS SYS NODE X NODE NODE
SYS SYS SYS SYS NODE NODE X NODE
SYS SYS SYS SYS NODE NODE NODE X`
	tray := `
X NODE SYS SYS
NODE X SYS SYS
SYS SYS X NODE
SYS SYS NODE X`
	twoSwitches := strings.ReplaceAll(ownRoot, "NODE", "PIX")
	tests := map[string]struct{ bus, links string }{
		"dgx-a100": {
			bus: `
X PXB SYS SYS SYS SYS SYS SYS
PXB X SYS SYS SYS SYS SYS SYS
SYS SYS X PXB SYS SYS SYS SYS
SYS SYS PXB X SYS SYS SYS SYS
SYS SYS SYS SYS X PXB SYS SYS
SYS SYS SYS SYS PXB X SYS SYS
SYS SYS SYS SYS SYS SYS X PXB
SYS SYS SYS SYS SYS SYS PXB X`,
			links: allNVLink(8, "NV12"),
		},
		"dgx-h100":  {bus: ownRoot, links: allNVLink(8, "NV18")},
		"hgx-b200":  {bus: ownRoot, links: allNVLink(8, "NV18")},
		"gb200":     {bus: tray, links: allNVLink(4, "NV18")},
		"gb300":     {bus: tray, links: allNVLink(4, "NV18")},
		"a100-40gb": {bus: "X", links: "X"},
		"l40s":      {bus: twoSwitches, links: twoSwitches},
		"t4":        {bus: allNVLink(4, "PHB"), links: allNVLink(4, "PHB")},
	}
	for _, profile := range Profiles() {
		t.Run(profile, func(t *testing.T) {
			lib := open(t, mustNew(t, profile))
			want := tests[profile]
			if diff := cmp.Diff(strings.TrimSpace(want.bus), matrix(t, lib, busWord)); diff != "" {
				t.Errorf("topo -mp (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(strings.TrimSpace(want.links), matrix(t, lib, linkWord)); diff != "" {
				t.Errorf("topo -m (-want +got):\n%s", diff)
			}
		})
	}
}

func matrix(t *testing.T, lib *Library, word func(t *testing.T, a, b nvml.Device) string) string {
	t.Helper()
	var rows []string
	for _, a := range lib.devices {
		var cells []string
		for _, b := range lib.devices {
			if a == b {
				cells = append(cells, "X")
			} else {
				cells = append(cells, word(t, a, b))
			}
		}
		rows = append(rows, strings.Join(cells, " "))
	}
	return strings.Join(rows, "\n")
}

func busWord(t *testing.T, a, b nvml.Device) string {
	t.Helper()
	level, ret := a.GetTopologyCommonAncestor(b)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	return map[nvml.GpuTopologyLevel]string{
		nvml.TOPOLOGY_SINGLE: "PIX", nvml.TOPOLOGY_MULTIPLE: "PXB", nvml.TOPOLOGY_HOSTBRIDGE: "PHB",
		nvml.TOPOLOGY_NODE: "NODE", nvml.TOPOLOGY_SYSTEM: "SYS",
	}[level]
}

func linkWord(t *testing.T, a, b nvml.Device) string {
	t.Helper()
	status, ret := a.GetP2PStatus(b, nvml.P2P_CAPS_INDEX_NVLINK)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	if status != nvml.P2P_STATUS_OK {
		return busWord(t, a, b)
	}
	active := 0
	for i := range nvml.NVLINK_MAX_LINKS {
		if state, _ := a.GetNvLinkState(i); state == nvml.FEATURE_ENABLED {
			active++
		}
	}
	return fmt.Sprintf("NV%d", active)
}

func TestTheLinksOfADGXH100EndAtItsFourSwitches(t *testing.T) {
	device := open(t, mustNew(t, "dgx-h100")).devices[5]
	got := map[string]int{}
	for i := range 18 {
		remote, ret := device.GetNvLinkRemoteDeviceType(i)
		if remote != nvml.NVLINK_DEVICE_TYPE_SWITCH || ret != nvml.SUCCESS {
			t.Fatalf("link %d ends at type %v, %v", i, remote, ret)
		}
		info, ret := device.GetNvLinkRemotePciInfo(i)
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		got[text(info.BusId[:])]++
	}
	want := map[string]int{"00000000:05:00.0": 4, "00000000:06:00.0": 5, "00000000:07:00.0": 5, "00000000:08:00.0": 4}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("links by switch (-want +got):\n%s", diff)
	}
	if _, ret := device.GetNvLinkState(18); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("link 18 of 18: %v, want %v", ret, nvml.ERROR_NOT_SUPPORTED)
	}
	if _, ret := device.GetNvLinkState(nvml.NVLINK_MAX_LINKS); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("link beyond any GPU's: %v, want %v", ret, nvml.ERROR_INVALID_ARGUMENT)
	}
}

func TestGPUsLinkedInPairsReachOnlyTheirPeer(t *testing.T) {
	p, err := LoadProfile("l40s")
	if err != nil {
		t.Fatal(err)
	}
	p.GPU.NVLink = &NVLink{Version: 3, Links: 4}
	for i := range p.GPUs {
		p.GPUs[i].NVLinkPeers = []int{i ^ 1, i ^ 1, i ^ 1, i ^ 1}
	}
	p.GPUs[6].NVLinkDown = true
	if err := p.validate(); err != nil {
		t.Fatal(err)
	}
	lib := open(t, NewFromProfile(p, "node-a"))
	want := `
X NV4 PIX PIX SYS SYS SYS SYS
NV4 X PIX PIX SYS SYS SYS SYS
PIX PIX X NV4 SYS SYS SYS SYS
PIX PIX NV4 X SYS SYS SYS SYS
SYS SYS SYS SYS X NV4 PIX PIX
SYS SYS SYS SYS NV4 X PIX PIX
SYS SYS SYS SYS PIX PIX X PIX
SYS SYS SYS SYS PIX PIX PIX X`
	if diff := cmp.Diff(strings.TrimSpace(want), matrix(t, lib, linkWord)); diff != "" {
		t.Errorf("topo -m (-want +got):\n%s", diff)
	}
	info, _ := lib.devices[0].GetNvLinkRemotePciInfo(0)
	if got := text(info.BusId[:]); got != "00000000:19:00.0" {
		t.Errorf("link 0 of GPU 0 ends at %s, want 00000000:19:00.0", got)
	}
}

func TestTheFabricOfEachProfile(t *testing.T) {
	tests := map[string]struct {
		ret     nvml.Return
		cluster bool
	}{
		"dgx-a100": {nvml.ERROR_NOT_SUPPORTED, false},
		"dgx-h100": {nvml.SUCCESS, false},
		"hgx-b200": {nvml.SUCCESS, false},
		"gb200":    {nvml.SUCCESS, true},
		"l40s":     {nvml.ERROR_NOT_SUPPORTED, false},
		"t4":       {nvml.ERROR_NOT_SUPPORTED, false},
	}
	for profile, want := range tests {
		info, ret := open(t, mustNew(t, profile)).devices[0].GetGpuFabricInfo()
		if cluster := info.ClusterUuid != [16]uint8{}; ret != want.ret || cluster != want.cluster {
			t.Errorf("%s: %v, in a cluster: %t, want %v, %t", profile, ret, cluster, want.ret, want.cluster)
		}
	}
}

// text reads a C string.
func text(chars []int8) string {
	var b []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}
