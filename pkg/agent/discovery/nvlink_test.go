// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

func TestNVLinkDomains(t *testing.T) {
	direct := func(links int, peers ...[]int) func(*nvmlsim.Profile) {
		return func(p *nvmlsim.Profile) {
			p.GPU.NVLink = &nvmlsim.NVLink{Version: 2, Links: links}
			p.GPUs = p.GPUs[:len(peers)]
			for i := range peers {
				p.GPUs[i].NVLinkPeers = peers[i]
			}
		}
	}
	const first, second = "nvlink-0000-18-00-0", "nvlink-0000-1a-00-0"
	tests := map[string]struct {
		profile string
		change  func(*nvmlsim.Profile)
		want    []string // of each GPU: domain, then peers with their links
	}{
		"a machine without NVLink has none": {
			profile: "l40s",
			change:  func(p *nvmlsim.Profile) { p.GPUs = p.GPUs[:2] },
			want:    []string{"", ""},
		},
		"pairs linked by bridges are domains of two": {
			profile: "l40s",
			change:  direct(4, []int{1, 1, 1, 1}, []int{0, 0, 0, 0}, []int{3, 3, 3, 3}, []int{2, 2, 2, 2}),
			want:    []string{first + " 1×4", first + " 0×4", second + " 3×4", second + " 2×4"},
		},
		"a ring is one domain, but only neighbours are peers": {
			profile: "l40s",
			change:  direct(2, []int{1, 3}, []int{0, 2}, []int{1, 3}, []int{2, 0}),
			want: []string{
				first + " 1×1 3×1", first + " 0×1 2×1", first + " 1×1 3×1", first + " 0×1 2×1",
			},
		},
		"a GPU whose links to the switches are down is outside": {
			profile: "hgx-b200",
			change: func(p *nvmlsim.Profile) {
				p.GPUs = p.GPUs[:3]
				p.GPUs[0].NVLinkDown = true
			},
			want: []string{"", "nvlink-0000-43-00-0 2×18", "nvlink-0000-43-00-0 1×18"},
		},
		"a GPU alone on the switches has links but no domain": {
			profile: "dgx-a100",
			change:  func(p *nvmlsim.Profile) { p.GPUs = p.GPUs[:1] },
			want:    []string{"alone"},
		},
		"a clique over nodes names the domain, also for a GPU alone": {
			profile: "gb200",
			change:  func(p *nvmlsim.Profile) { p.GPUs = p.GPUs[:1] },
			want:    []string{"5f6d2f3e-0c8b-4f0e-9d55-6a7f2b1c9e10.2"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p, err := nvmlsim.LoadProfile(test.profile)
			if err != nil {
				t.Fatal(err)
			}
			test.change(p)
			lib, sysfs := machineOf(t, p)
			if diff := cmp.Diff(test.want, connections(discover(t, lib, sysfs))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// connections tells each GPU's domain, and its peers by their index.
func connections(node *Node) []string {
	index := map[string]int{}
	for i, gpu := range node.GPUs {
		index[gpu.Name] = i
	}
	var all []string
	for _, gpu := range node.GPUs {
		s := ""
		if link := gpu.NVLink; link != nil {
			if s = link.Domain; s == "" {
				s = "alone"
			}
			for _, peer := range link.Peers {
				s += fmt.Sprintf(" %d×%d", index[peer.Name], peer.Links)
			}
		}
		all = append(all, s)
	}
	return all
}

func TestGPUsOnHiddenSwitches(t *testing.T) {
	tests := map[string]struct {
		reach func(a, b int) (bool, error)
		want  []string
	}{
		"the driver knows who reaches whom: two partitions of a fabric manager": {
			reach: func(a, b int) (bool, error) { return a/2 == b/2, nil },
			want: []string{
				"nvlink-0000-18-00-0 1×6", "nvlink-0000-18-00-0 0×6", "nvlink-0000-1a-00-0 3×6", "nvlink-0000-1a-00-0 2×6",
			},
		},
		"the driver can't tell: all of them": {
			reach: func(int, int) (bool, error) { return false, nvml.ErrNotSupported },
			want: []string{
				"nvlink-0000-18-00-0 1×6 2×6 3×6", "nvlink-0000-18-00-0 0×6 2×6 3×6",
				"nvlink-0000-18-00-0 0×6 1×6 3×6", "nvlink-0000-18-00-0 0×6 1×6 2×6",
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p, err := nvmlsim.LoadProfile("l40s")
			if err != nil {
				t.Fatal(err)
			}
			p.GPUs = p.GPUs[:4]
			lib, sysfs := machineOf(t, p)
			node := discover(t, guest{lib, test.reach}, sysfs)
			if diff := cmp.Diff(test.want, connections(node)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// guest is a virtual machine's library: its GPUs have six links each, and the
// switches at their ends are hidden.
type guest struct {
	nvml.Library
	reach func(a, b int) (bool, error)
}

func (g guest) Device(index int) (nvml.Device, error) {
	d, err := g.Library.Device(index)
	return guestDevice{d, index, g.reach}, err
}

type guestDevice struct {
	nvml.Device
	index int
	reach func(a, b int) (bool, error)
}

func (guestDevice) NVLinks() ([]nvml.NVLink, error) {
	links := make([]nvml.NVLink, 6)
	for i := range links {
		links[i] = nvml.NVLink{Index: i, Version: 3, Remote: nvml.RemoteUnknown}
	}
	return links, nil
}

func (d guestDevice) ReachesOverNVLink(other nvml.Device) (bool, error) {
	return d.reach(d.index, other.(guestDevice).index)
}
