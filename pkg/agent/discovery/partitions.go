// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// MIG says how a GPU can be partitioned.
type MIG struct {
	// Switches tells that the mode changes without a reset of the GPU: from Hopper on.
	Switches bool
	// Profiles of the partitions that the GPU can have, in any mode.
	Profiles []nvml.MIGProfile
}

// Partition is a place on a GPU for one MIG device.
type Partition struct {
	Profile *nvml.MIGProfile
	At      nvml.Placement
	// Compute is nil for a MIG device that has all compute slices of the place, and tells for others which they are: such have the place's
	// memory and engines in common. They are made by administrators only.
	Compute *nvml.Placement
	// Multiprocessors of one that has not all, which are its own.
	Multiprocessors uint32
	// UUID of the MIG device, empty for one that is made when a claim gets it.
	UUID string
}

// Name of the profile, as nvidia-smi has it: 1c.3g.40gb has one compute slice of a 3g.40gb.
func (p *Partition) Name() string {
	if p.Compute != nil {
		return fmt.Sprintf("%dc.%s", p.Compute.Size, p.Profile.Name)
	}
	return p.Profile.Name
}

// Offer is a device that claims can have: a whole GPU or a part of it.
type Offer struct {
	Name string
	// Partition is nil for the whole GPU.
	Partition *Partition
	// Shares is nil for a device that one claim has at a time.
	Shares *Shares
	// Passthrough: it is the whole GPU for a virtual machine, with the driver vfio-pci.
	Passthrough bool
	// Strategies are those by which the processes of a claim may share the device, as they are published; empty for a virtual machine's.
	Strategies string
	// SharedByNamespace: claims of one namespace at a time have shares of it.
	SharedByNamespace bool
}

// Policy says what a node offers.
type Policy struct {
	// Dynamic partitions are made when a claim gets them, besides those that an administrator has made.
	Dynamic bool
	// Ours is what the agent has made itself, as of now. What is not its own was made by an administrator, and is offered as it is. Nil
	// means that nothing is its own.
	Ours func() Made
	// Shares says which GPUs several claims can have at once. No partitions are made of these.
	Shares Shares
	// Passthrough: whole GPUs are offered to virtual machines, too.
	Passthrough bool
	// Sharing is what the node's administrator has decided about it.
	Sharing config.Rules
}

// Made are places in which MIG instances were made and, as places of size 0, GPUs whose MIG mode was enabled.
type Made = sets.Set[Place]

// Place is one on the GPU of that name.
type Place struct {
	GPU string
	At  nvml.Placement
}

// Since is the policy for what NVML is asked from now on. What the agent takes back until Offer is called may be in the
// answers, and was made by no administrator.
func (p Policy) Since() Policy {
	ours := p.Ours
	if ours == nil {
		return p
	}
	before := ours()
	p.Ours = func() Made { return before.Union(ours()) }
	return p
}

// hopper is the first compute capability with a MIG mode that changes without a reset.
const hopper = 9

// askMIG asks about partitions. A GPU is usable as a whole without the answer.
func (f *found) askMIG(mode nvml.MIGMode, capability nvml.Version) {
	if !mode.Capable {
		return
	}
	mig := &MIG{Switches: capability.Major >= hopper}
	var err error
	if mig.Profiles, err = f.device.MIGProfiles(); err != nil {
		f.warn("MIG profiles unknown: %v", err)
		return
	}
	if f.gpu.MIGInstances, err = f.device.GPUInstances(); err != nil {
		f.warn("MIG devices unknown: %v", err)
		return
	}
	for _, instance := range f.gpu.MIGInstances {
		if len(instance.Devices) == 0 {
			f.warn("MIG GPU instance %d has no compute instance, and cannot be used without: make one with nvidia-smi mig -i %s -gi %d -cci",
				instance.ID, f.gpu.PCIBusID, instance.ID)
		}
	}
	f.gpu.MIG = mig
}

// Offer decides which devices the node offers, and why a GPU offers none.
func (n *Node) Offer(policy Policy) {
	var ours Made
	if policy.Ours != nil {
		ours = policy.Ours()
	}
	policy.Shares = policy.Shares.byName(n)
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		gpu.offer(policy, ours)
		for o := range gpu.Offers {
			if offer := &gpu.Offers[o]; !offer.Passthrough {
				offer.Strategies = policy.Sharing.Strategies(offer.Shares != nil)
				offer.SharedByNamespace = policy.Sharing.SharedByNamespace(offer.Shares != nil)
			}
		}
	}
}

// offer lists the whole GPU first, then what an administrator has made, then what can be made beside that.
func (g *GPU) offer(policy Policy, ours Made) {
	g.Offers, g.NotOffered = nil, ""
	if g.Unseen() {
		if g.offerPassthrough(&policy); len(g.Offers) == 0 {
			g.NotOffered = cmp.Or(g.NoPassthrough, notSeen)
		}
		return
	}
	if shares := g.shares(&policy); shares != nil {
		g.Offers = []Offer{{Name: g.Name, Shares: shares}}
		return
	}
	given := g.given(ours)
	switchedOn := g.MIGEnabled && ours.Has(Place{GPU: g.Name})
	if !g.MIGEnabled || switchedOn && len(given) == 0 {
		g.Offers = append(g.Offers, Offer{Name: g.Name})
	}
	for _, instance := range given {
		if profile := g.MIG.profile(instance.ProfileID); profile != nil {
			g.Offers = append(g.Offers, g.made(profile, &instance)...)
		}
	}
	if policy.Dynamic && g.MIG != nil && (g.MIGEnabled || g.MIG.Switches) {
		g.Offers = append(g.Offers, g.possible(given)...)
	}
	g.offerPassthrough(&policy)
	if len(g.Offers) == 0 {
		g.NotOffered = "MIG mode is enabled, so the GPU can only be used in partitions, and none has been made: " +
			"make some with nvidia-smi mig -i " + g.PCIBusID + " -cgi <profile> -C, let the agent make them with --partitions=dynamic, " +
			"or disable MIG mode with nvidia-smi -i " + g.PCIBusID + " -mig 0 to offer the whole GPU"
	}
}

// given are the instances that an administrator has made.
func (g *GPU) given(ours Made) []nvml.GPUInstance {
	if g.MIG == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(g.MIGInstances), func(i nvml.GPUInstance) bool { return ours.Has(Place{g.Name, i.Placement}) })
}

// possible are the partitions that can be made beside those given, in the order of NVML's profiles.
func (g *GPU) possible(given []nvml.GPUInstance) []Offer {
	var offers []Offer
	for i := range g.MIG.Profiles {
		profile := &g.MIG.Profiles[i]
		for _, at := range profile.Placements {
			offer := g.partition(profile, at, "")
			if !slices.ContainsFunc(given, func(i nvml.GPUInstance) bool {
				return at.Start < i.Placement.Start+i.Placement.Size && i.Placement.Start < at.Start+at.Size || !g.Beside(i.ProfileID, &offer)
			}) {
				offers = append(offers, offer)
			}
		}
	}
	return offers
}

// made are the MIG devices of a GPU instance.
func (g *GPU) made(profile *nvml.MIGProfile, instance *nvml.GPUInstance) []Offer {
	var offers []Offer
	for _, device := range instance.Devices {
		offer := g.partition(profile, instance.Placement, device.UUID)
		switch at := device.Compute; {
		case at.Size == profile.ComputeSlices, at.Size == 0 && len(instance.Devices) == 1:
		case at.Size == 0:
			g.warnOnce(fmt.Sprintf("MIG device %s is not offered: the driver does not tell which part it is of its GPU instance", device.UUID))
			continue
		default:
			offer.Partition.Compute, offer.Partition.Multiprocessors = &at, device.Multiprocessors
			offer.Name = fmt.Sprintf("%s-mig-%s-%d-%d", g.Name, profileLabel.Replace(offer.Partition.Name()), instance.Placement.Start, at.Start)
		}
		offers = append(offers, offer)
	}
	return offers
}

// InstanceOf returns the MIG device that an offer is, as it was found; nil for the whole GPU, and for a partition that is not made.
func (g *GPU) InstanceOf(offer *Offer) *nvml.Instance {
	p := offer.Partition
	if p == nil {
		return nil
	}
	i := slices.IndexFunc(g.MIGInstances, func(i nvml.GPUInstance) bool { return i.ProfileID == p.Profile.ID && i.Placement == p.At })
	if i < 0 {
		return nil
	}
	found := &g.MIGInstances[i]
	for _, device := range found.Devices {
		// One that an administrator has made is known, and one that is made for a claim has all of its GPU instance.
		if device.UUID == p.UUID || p.UUID == "" && len(found.Devices) == 1 {
			return &nvml.Instance{GPU: found.ID, Compute: device.ComputeInstance}
		}
	}
	return &nvml.Instance{GPU: found.ID, Compute: nvml.AllCompute}
}

func (g *GPU) partition(profile *nvml.MIGProfile, at nvml.Placement, uuid string) Offer {
	return Offer{
		Name:      fmt.Sprintf("%s-mig-%s-%d", g.Name, profileLabel.Replace(profile.Name), at.Start),
		Partition: &Partition{Profile: profile, At: at, UUID: uuid},
	}
}

// profileLabel makes a part of a DNS label of a profile's name: 1g.10gb+me becomes 1g10gb-me.
var profileLabel = strings.NewReplacer(".", "", "-me", "-nome", "+", "-")

func (m *MIG) profile(id uint32) *nvml.MIGProfile {
	for i := range m.Profiles {
		if m.Profiles[i].ID == id {
			return &m.Profiles[i]
		}
	}
	return nil
}

// ErrNoDevice means that the node has no GPU or partition of that name.
var ErrNoDevice = errors.New("this node has no GPU of that name")

// Find returns the device of that name and the GPU that it is, or is a part of. The error says why it is not offered.
func (n *Node) Find(device string) (*GPU, *Offer, error) {
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		for o := range gpu.Offers {
			if gpu.Offers[o].Name == device {
				return gpu, &gpu.Offers[o], nil
			}
		}
		if device == gpu.Name || device == gpu.Name+passthroughSuffix || strings.HasPrefix(device, gpu.Name+"-mig-") {
			if device == gpu.Name+passthroughSuffix && gpu.NoPassthrough != "" {
				return nil, nil, fmt.Errorf("the GPU is not offered to virtual machines: %s", gpu.NoPassthrough)
			}
			if gpu.NotOffered != "" {
				return nil, nil, fmt.Errorf("the GPU is not offered: %s", gpu.NotOffered)
			}
			return nil, nil, fmt.Errorf("the GPU %s does not offer it", gpu.Name)
		}
	}
	return nil, nil, ErrNoDevice
}
