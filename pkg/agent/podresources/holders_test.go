// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const driverName = "gpu.nvidia.com"

// node has a GPU, one that is partitioned, and one that a virtual machine has, which has no UUID.
var node = []GPU{
	{Name: "gpu-0", UUID: uuid1, PCIBusID: "0000:1b:00.0", Minor: 0},
	{Name: "gpu-1", UUID: uuid2, PCIBusID: "0000:43:00.0", Minor: 1, MIG: []MIGDevice{{mig1, 3, 0}, {"MIG-2", 4, 0}}},
	{Name: "gpu-2", PCIBusID: "0000:52:00.0", Minor: -1},
}

// claims is a container that refers to claims.
func claims(pod, container string, claims ...Claim) Pod {
	return Pod{Namespace: "team-a", Name: pod, Containers: []Container{{Name: container, Claims: claims}}}
}

// plugged is a container with one device of a plugin.
func plugged(pod, resource string, ids ...string) Pod {
	return Pod{Namespace: "team-b", Name: pod, Containers: []Container{{Name: "main", Devices: []Devices{{resource, ids}}}}}
}

func TestHoldersOf(t *testing.T) {
	ours := func(device, share string) ClaimDevice { return ClaimDevice{driverName, "node-1", device, share} }
	whole := Prepared{Namespace: "team-a", Name: "c", Pool: "node-1", Device: "gpu-0", CDI: []string{"k/c=u1_r_gpu-0"}, At: Place{GPU: "gpu-0"}}
	onDemand := Prepared{
		Namespace: "team-a", Name: "m", Pool: "node-1", Device: "gpu-1-mig-1g10gb-0", CDI: []string{"k/c=u2_r_mig"}, At: Place{"gpu-1", mig1},
	}
	share := func(id string) Prepared {
		return Prepared{
			Namespace: "team-a", Name: "s" + id, Pool: "node-1", Device: "gpu-0", Share: id, CDI: []string{"k/c=u" + id}, At: Place{GPU: "gpu-0"},
		}
	}
	of := func(p Prepared) Claim {
		return Claim{Namespace: p.Namespace, Name: p.Name, Devices: []ClaimDevice{ours(p.Device, p.Share)}, CDI: p.CDI}
	}
	held := func(pod, container, claim string) Holder { return Holder{"team-a", pod, container, claim} }
	by := func(pod string) Holder { return Holder{"team-b", pod, "main", ""} }
	for name, tc := range map[string]struct {
		pods     []Pod
		prepared []Prepared
		want     Holders
	}{
		"nobody": {want: Holders{Of: map[Place][]Holder{}}},
		"a whole GPU by a claim": {
			[]Pod{claims("p", "main", of(whole)), claims("q", "main")},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "c")}}},
		},
		"a partition made on demand": {
			[]Pod{claims("p", "main", of(onDemand)), claims("q", "main", of(whole))},
			[]Prepared{onDemand, whole},
			Holders{Of: map[Place][]Holder{{"gpu-1", mig1}: {held("p", "main", "m")}, {GPU: "gpu-0"}: {held("q", "main", "c")}}},
		},
		"two containers and two pods on one claim": {
			[]Pod{claims("q", "main", of(whole)), {Namespace: "team-a", Name: "p", Containers: []Container{
				{Name: "b", Claims: []Claim{of(whole)}}, {Name: "a", Claims: []Claim{of(whole), of(whole)}}, {Name: "c"},
			}}},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "a", "c"), held("p", "b", "c"), held("q", "main", "c")}}},
		},
		"shares of a GPU": {
			[]Pod{claims("p", "main", of(share("1"))), claims("q", "main", of(share("2")))},
			[]Prepared{share("1"), share("2")},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "s1"), held("q", "main", "s2")}}},
		},
		"a container with two claims, on one GPU and on two": {
			[]Pod{claims("p", "main", of(share("1")), of(share("2")), of(onDemand))},
			[]Prepared{share("1"), share("2"), onDemand},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "s1"), held("p", "main", "s2")}, {"gpu-1", mig1}: {held("p", "main", "m")}}},
		},
		"a share of another ID is another device": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "s1", Devices: []ClaimDevice{ours("gpu-0", "other")}})},
			[]Prepared{share("1")},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("", "", "s1")}}},
		},
		"a kubelet that tells no share IDs": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "s1", Devices: []ClaimDevice{ours("gpu-0", "")}, CDI: share("1").CDI})},
			[]Prepared{share("1")},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "s1")}}},
		},
		"a kubelet that tells CDI names alone": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "m", CDI: []string{"other/c=1", "k/c=u2_r_mig"}})},
			[]Prepared{onDemand},
			Holders{Of: map[Place][]Holder{{"gpu-1", mig1}: {held("p", "main", "m")}}},
		},
		"a kubelet that tells devices alone": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "c", Devices: []ClaimDevice{ours("gpu-0", "")}})},
			[]Prepared{whole, {Namespace: "team-a", Name: "c", Pool: "node-1", Device: "gpu-1", At: Place{GPU: "gpu-1"}}},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "c")}, {GPU: "gpu-1"}: {held("", "", "c")}}},
		},
		"a kubelet that tells nothing of claims": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "c"})},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("", "", "c")}}},
		},
		"an earlier claim of that name": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "c", Devices: []ClaimDevice{ours("gpu-0", "")}, CDI: []string{"k/c=u9_r_gpu-0"}})},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("", "", "c")}}},
		},
		"a claim of that name in another namespace": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-x", Name: "c", Devices: of(whole).Devices, CDI: whole.CDI})},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("", "", "c")}}},
		},
		"the device of that name of another driver, and of another pool": {
			[]Pod{claims("p", "main", Claim{Namespace: "team-a", Name: "c", Devices: []ClaimDevice{
				{"other.com", "node-1", "gpu-0", ""}, {driverName, "node-2", "gpu-0", ""},
			}, CDI: whole.CDI})},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("", "", "c")}}},
		},
		"a claim that is not prepared any more": {
			[]Pod{claims("p", "main", of(whole))}, nil, Holders{Of: map[Place][]Holder{}},
		},
		"one of the claim's two devices": {
			[]Pod{claims("p", "main", of(onDemand))},
			[]Prepared{onDemand, {Namespace: "team-a", Name: "m", Pool: "node-1", Device: "gpu-0", CDI: []string{"k/c=u2_r_gpu"}, At: Place{GPU: "gpu-0"}}},
			Holders{Of: map[Place][]Holder{{"gpu-1", mig1}: {held("p", "main", "m")}, {GPU: "gpu-0"}: {held("", "", "m")}}},
		},
		"device plugins": {
			[]Pod{
				plugged("p", "nvidia.com/gpu", uuid1), plugged("q", "nvidia.com/mig-1g.10gb", mig1), plugged("r", "renamed.example.com/gpu", uuid1+"::3", uuid1+"::4"),
				plugged("s", "nvidia.com/gpu", "nvidia1/gi4/vgpu0"), plugged("t", "nvidia.com/GH100", "0000:52:00.0"),
				plugged("u", "nvidia.com/mig-1g.10gb", "MIG-"+uuid2+"/3/0"), plugged("v", "vendor.com/nic", "0000:52:00.0", "nvidia0"),
			},
			nil,
			Holders{Of: map[Place][]Holder{
				{GPU: "gpu-0"}: {by("p"), by("r")}, {"gpu-1", mig1}: {by("q"), by("u")}, {"gpu-1", "MIG-2"}: {by("s")}, {GPU: "gpu-2"}: {by("t")},
			}},
		},
		"devices that the node does not have": {
			[]Pod{
				plugged("p", "nvidia.com/gpu", "GPU-99999999-0000-0000-0000-000000000000", "nvidia7"), plugged("q", "nvidia.com/mig-1g.10gb", "nvidia0/gi9"),
				plugged("r", "vendor.com/fpga", "fpga0"),
			},
			nil,
			Holders{Of: map[Place][]Holder{}, Unknown: []string{"nvidia.com/gpu", "nvidia.com/mig-1g.10gb"}},
		},
		"a plugin and a claim have one GPU": {
			[]Pod{claims("p", "main", of(whole)), plugged("q", "nvidia.com/gpu", uuid1)},
			[]Prepared{whole},
			Holders{Of: map[Place][]Holder{{GPU: "gpu-0"}: {held("p", "main", "c"), by("q")}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, HoldersOf(driverName, tc.pods, tc.prepared, node)); diff != "" {
				t.Errorf("holders (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHoldersAreBounded(t *testing.T) {
	var pods []Pod
	for i := range MaxHolders + 7 {
		pods = append(pods, plugged(fmt.Sprintf("p-%03d", i), "nvidia.com/gpu", uuid1+"::1"), plugged(fmt.Sprintf("q-%03d", i), "nvidia.com/gpu", mig1))
	}
	got := HoldersOf(driverName, pods, nil, node)
	for _, at := range []Place{{GPU: "gpu-0"}, {"gpu-1", mig1}} {
		if n := len(got.Of[at]); n != MaxHolders {
			t.Errorf("%v has %d holders, want %d", at, n, MaxHolders)
		}
	}
	if got.LeftOut != 14 {
		t.Errorf("%d are left out, want 14", got.LeftOut)
	}
}

// TestOneTenantLeavesOutNoOther: of each namespace as many are told as of the others, and of each pod or claim.
func TestOneTenantLeavesOutNoOther(t *testing.T) {
	var pods []Pod
	add := func(namespace, pod string, containers int) {
		p := Pod{Namespace: namespace, Name: pod}
		for i := range containers {
			p.Containers = append(p.Containers, Container{
				Name: fmt.Sprintf("c-%03d", i), Devices: []Devices{{"nvidia.com/gpu", []string{uuid1, mig1}}},
			})
		}
		pods = append(pods, p)
	}
	var prepared []Prepared
	for _, at := range []Place{{GPU: "gpu-0"}, {"gpu-1", mig1}} {
		prepared = append(prepared, Prepared{Namespace: "team-a", Name: "c", At: at}, Prepared{Namespace: "team-a", Name: "d", At: at})
	}
	add("team-a", "many", MaxHolders)
	for i := range MaxHolders {
		add("team-a", fmt.Sprintf("p-%03d", i), 1)
	}
	add("team-b", "many", MaxHolders)
	add("team-b", "other", 2)
	add("team-c", "one", 1)
	got := HoldersOf(driverName, pods, prepared, node)
	for _, at := range []Place{{GPU: "gpu-0"}, {"gpu-1", mig1}} {
		told := map[string]int{}
		for _, h := range got.Of[at] {
			told[h.Namespace]++
			if h.Namespace == "team-b" || h.Pod == "many" || h.Claim != "" {
				told[h.Namespace+"/"+h.Pod+h.Claim]++
			}
		}
		want := map[string]int{
			"team-a": 64, "team-a/many": 1, "team-a/c": 1, "team-a/d": 1, "team-b": 63, "team-b/many": 61, "team-b/other": 2, "team-c": 1,
		}
		if diff := cmp.Diff(want, told); diff != "" {
			t.Errorf("%v: holders told (-want +got):\n%s", at, diff)
		}
		if !slices.IsSortedFunc(got.Of[at], Holder.compare) {
			t.Errorf("%v: holders are not sorted", at)
		}
	}
	if want := 2 * (2 + 3*MaxHolders + 3 - MaxHolders); got.LeftOut != want {
		t.Errorf("%d are left out, want %d", got.LeftOut, want)
	}
}

func TestOffersOf(t *testing.T) {
	got := OffersOf([]Devices{
		{"nvidia.com/gpu.shared", []string{uuid1 + "::0", uuid1 + "::1"}},
		{"nvidia.com/gpu.shared", []string{uuid1 + "::2"}},
		{"nvidia.com/gpu", []string{uuid1, "nvidia9"}},
		{"nvidia.com/mig-1g.10gb", []string{mig1}},
		{"vendor.com/nic", []string{"nic0"}},
	}, node)
	want := []Offer{
		{Place{GPU: "gpu-0"}, "nvidia.com/gpu", 1}, {Place{GPU: "gpu-0"}, "nvidia.com/gpu.shared", 3}, {Place{"gpu-1", mig1}, "nvidia.com/mig-1g.10gb", 1},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
}
