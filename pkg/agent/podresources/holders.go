// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"cmp"
	"slices"
	"strings"
)

// GPU is what must be known of one to find it by a device plugin's ID.
type GPU struct {
	// Name of the GPU's device, such as gpu-0000-1b-00-0.
	Name, UUID, PCIBusID string
	// Minor is -1 where it is not known.
	Minor int
	// MIG are the MIG devices that there are.
	MIG []MIGDevice
}

// MIGDevice of a GPU.
type MIGDevice struct {
	UUID                         string
	GPUInstance, ComputeInstance int
}

// Place is what is held: a GPU, by the name of its device, or a MIG device of it, by its UUID.
type Place struct{ GPU, MIG string }

// Holder is a container that has a device, by a claim or, with no claim, by a device plugin. Of a claim that no container is known to
// use the pod and the container are empty.
type Holder struct{ Namespace, Pod, Container, Claim string }

func (h Holder) compare(g Holder) int {
	return cmp.Or(cmp.Compare(h.Namespace, g.Namespace), cmp.Compare(h.Pod, g.Pod), cmp.Compare(h.Container, g.Container),
		cmp.Compare(h.Claim, g.Claim))
}

// Prepared is a device of a claim that the agent has handed out. One with admin access, which others hold, is none.
type Prepared struct {
	// Namespace and Name of the claim.
	Namespace, Name string
	// Pool, Device and Share as in the claim's allocation.
	Pool, Device, Share string
	// CDI are the names that the kubelet was told. They have the claim's UID, so they tell it from another claim of that name.
	CDI []string
	// At is where the device is. That of a partition which was made for the claim is known to who made it alone.
	At Place
}

// Offer is how many IDs of a resource a device plugin has for a place.
type Offer struct {
	At       Place
	Resource string
	IDs      int
}

// MaxHolders is how many holders of one place are told, in turn of their namespaces. Shares and replicas of a GPU may have more.
const MaxHolders = 128

// Holders are those of each place, each once, sorted by their names.
type Holders struct {
	Of map[Place][]Holder
	// LeftOut is how many more there are than MaxHolders, of all places.
	LeftOut int
	// Unknown are device plugins' resources of IDs that seem to name a GPU, and none of the node's, each once.
	Unknown []string
}

// HoldersOf tells who has the GPUs of a node. Prepared claims count whether or not the kubelet knows of a pod, and no claim counts
// that is not prepared: what the kubelet has said may be old. driver is the agent's name in claims.
func HoldersOf(driver string, pods []Pod, prepared []Prepared, gpus []GPU) Holders {
	all := Holders{Of: map[Place][]Holder{}}
	type name struct{ namespace, name string }
	type use struct {
		claim *Claim
		by    Holder
	}
	uses := map[name][]use{}
	eachContainer(pods, func(pod *Pod, container *Container) {
		for c := range container.Claims {
			claim := &container.Claims[c]
			of := name{claim.Namespace, claim.Name}
			uses[of] = append(uses[of], use{claim, Holder{pod.Namespace, pod.Name, container.Name, claim.Name}})
		}
	})
	for i := range prepared {
		p := &prepared[i]
		found := false
		for _, u := range uses[name{p.Namespace, p.Name}] {
			if p.is(driver, u.claim) {
				found = true
				all.add(p.At, u.by)
			}
		}
		if !found {
			all.add(p.At, Holder{Namespace: p.Namespace, Claim: p.Name})
		}
	}
	eachContainer(pods, func(pod *Pod, container *Container) {
		for _, devices := range container.Devices {
			for _, id := range devices.IDs {
				if at, ok := all.find(devices.Resource, id, gpus); ok {
					all.add(at, Holder{Namespace: pod.Namespace, Pod: pod.Name, Container: container.Name})
				}
			}
		}
	})
	all.finish()
	return all
}

// OffersOf tells which GPUs device plugins have for pods, by what the kubelet says is allocatable.
func OffersOf(allocatable []Devices, gpus []GPU) []Offer {
	var unknown Holders
	counts := map[Offer]int{}
	for _, devices := range allocatable {
		for _, id := range devices.IDs {
			if at, ok := unknown.find(devices.Resource, id, gpus); ok {
				counts[Offer{At: at, Resource: devices.Resource}]++
			}
		}
	}
	offers := make([]Offer, 0, len(counts))
	for offer, ids := range counts {
		offer.IDs = ids
		offers = append(offers, offer)
	}
	slices.SortFunc(offers, func(a, b Offer) int {
		return cmp.Or(cmp.Compare(a.At.GPU, b.At.GPU), cmp.Compare(a.At.MIG, b.At.MIG), cmp.Compare(a.Resource, b.Resource))
	})
	return offers
}

// is tells whether a container's claim of that name has the device.
func (p *Prepared) is(driver string, claim *Claim) bool {
	// A kubelet that names devices says which these are; all others tell by CDI names alone.
	if len(claim.Devices) > 0 && !slices.ContainsFunc(claim.Devices, func(d ClaimDevice) bool {
		return d.Driver == driver && d.Pool == p.Pool && d.Device == p.Device && (d.Share == p.Share || d.Share == "")
	}) {
		return false
	}
	if len(claim.CDI) == 0 {
		return len(claim.Devices) > 0
	}
	return slices.ContainsFunc(p.CDI, func(name string) bool { return slices.Contains(claim.CDI, name) })
}

// find returns the place that a device plugin's ID names.
func (h *Holders) find(resource, id string, gpus []GPU) (Place, bool) {
	device, err := ParseDeviceID(id)
	if err != nil || device.UUID == "" && !strings.HasPrefix(resource, "nvidia.com/") {
		return Place{}, false // of something else: others' devices have minors and PCI addresses, too
	}
	if at, ok := Find(gpus, device); ok {
		return at, true
	}
	if !slices.Contains(h.Unknown, resource) {
		h.Unknown = append(h.Unknown, resource)
	}
	return Place{}, false
}

// Find returns the place that an ID names.
func Find(gpus []GPU, id DeviceID) (Place, bool) {
	for i := range gpus {
		if at, ok := gpus[i].place(id); ok {
			return at, true
		}
	}
	return Place{}, false
}

// place returns what the ID names of the GPU.
func (g *GPU) place(id DeviceID) (Place, bool) {
	if id.UUID != "" && id.GPUInstance == nil {
		if i := slices.IndexFunc(g.MIG, func(m MIGDevice) bool { return m.UUID == id.UUID }); i >= 0 {
			return Place{GPU: g.Name, MIG: id.UUID}, true
		}
	}
	var is bool
	switch {
	case id.UUID != "":
		is = id.UUID == g.UUID
	case id.PCIBusID != "":
		is = id.PCIBusID == g.PCIBusID
	case id.Minor != nil:
		is = *id.Minor == g.Minor
	}
	if !is {
		return Place{}, false
	}
	if id.GPUInstance == nil {
		return Place{GPU: g.Name}, true
	}
	i := slices.IndexFunc(g.MIG, func(m MIGDevice) bool {
		return m.GPUInstance == *id.GPUInstance && (id.ComputeInstance == nil || m.ComputeInstance == *id.ComputeInstance)
	})
	if i < 0 {
		return Place{}, false
	}
	return Place{GPU: g.Name, MIG: g.MIG[i].UUID}, true
}

func (h *Holders) add(at Place, holder Holder) { h.Of[at] = append(h.Of[at], holder) }

func (h *Holders) finish() {
	for at, holders := range h.Of {
		slices.SortFunc(holders, Holder.compare)
		holders = slices.Compact(holders)
		if more := len(holders) - MaxHolders; more > 0 {
			h.LeftOut += more
			holders = InTurn(holders)[:MaxHolders]
			slices.SortFunc(holders, Holder.compare)
		}
		h.Of[at] = holders
	}
	slices.Sort(h.Unknown)
}

// InTurn are the holders of a place, each once, with one of each namespace first, then a second one of each, and so on: so the
// first ones are not all of one tenant. Within a namespace it is the same with pods, and with claims without a pod. Otherwise
// they keep their order.
func InTurn(holders []Holder) []Holder {
	holders = spread(slices.Clone(holders), func(h Holder) Holder {
		h.Container = ""
		if h.Pod != "" {
			h.Claim = ""
		}
		return h
	})
	return spread(holders, func(h Holder) Holder { return Holder{Namespace: h.Namespace} })
}

// spread puts the first one of each group first, then the second ones.
func spread(holders []Holder, group func(Holder) Holder) []Holder {
	turns, sizes := map[Holder]int{}, map[Holder]int{}
	for _, holder := range holders {
		of := group(holder)
		turns[holder] = sizes[of]
		sizes[of]++
	}
	slices.SortStableFunc(holders, func(a, b Holder) int { return cmp.Compare(turns[a], turns[b]) })
	return holders
}

func eachContainer(pods []Pod, visit func(*Pod, *Container)) {
	for i := range pods {
		for c := range pods[i].Containers {
			visit(&pods[i], &pods[i].Containers[c])
		}
	}
}
