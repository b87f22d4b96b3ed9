// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// candidate is a device that is offered, once it is certain that it can be.
type candidate struct {
	resource string
	gpu      *discovery.GPU
	// at is nil for a whole GPU.
	at *ledger.Partition
	// share is nil but for a replica.
	share  *ledger.Share
	device deviceplugin.Device
}

// MIGStrategy says how MIG devices that an administrator has made are offered by the device plugin API. The words are those of NVIDIA's
// device plugin (--mig-strategy).
type MIGStrategy string

// The strategies.
const (
	// MIGNone offers none.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers them as GPUResource, if all GPUs of the path are partitioned, and all devices have one profile.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers each as a resource of its profile: nvidia.com/mig-1g.10gb.
	MIGMixed MIGStrategy = "mixed"
)

// candidates are whole GPUs, replicas of those that are shared and, by the strategy, MIG devices.
func (p *Path) candidates(node *discovery.Node, paths *advertise.Paths) []candidate {
	var whole, replicas, parts []candidate
	profiles := sets.New[string]()
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		if paths.Of(gpu) != advertise.DevicePlugin {
			continue
		}
		for o := range gpu.Offers {
			switch offer := &gpu.Offers[o]; {
			case offer.Passthrough:
			case offer.Shares != nil:
				replicas = append(replicas, p.replicasOf(gpu, offer)...)
			case offer.Partition == nil && gpu.UUID != "":
				whole = append(whole, newCandidate(GPUResource, gpu, nil, gpu.Name, gpu.UUID))
			case offer.Partition != nil && offer.Partition.UUID != "":
				profiles.Insert(offer.Partition.Name())
				parts = append(parts, newCandidate(migResource(offer.Partition), gpu, p.opts.PlaceOf(offer), offer.Name, offer.Partition.UUID))
			}
		}
	}
	switch {
	case p.mig == MIGMixed:
		return slices.Concat(whole, replicas, parts)
	case p.mig == MIGSingle && len(whole) == 0 && len(profiles) == 1:
		for i := range parts {
			parts[i] = newCandidate(GPUResource, parts[i].gpu, parts[i].at, parts[i].device.Name, parts[i].device.UUID)
		}
		return append(replicas, parts...)
	}
	return append(whole, replicas...)
}

// replicasOf are the devices as which a GPU is offered that is shared.
func (p *Path) replicasOf(gpu *discovery.GPU, offer *discovery.Offer) (replicas []candidate) {
	share := p.shareOf(gpu, offer)
	if gpu.UUID == "" || share == nil {
		return nil
	}
	for n := range offer.Shares.Replicas {
		c := newCandidate(SharedResource, gpu, nil, gpu.Name, gpu.UUID)
		of := ledger.PluginDevice{Resource: SharedResource, ID: hold.ReplicaID(gpu.UUID, n)}
		c.share, c.device.ID, c.device.CDIName = share, of.ID, cdi.ShareDeviceID(hold.UID(of), hold.Request, gpu.Name, hold.ShareID(of))
		replicas = append(replicas, c)
	}
	return replicas
}

// noReplicas is why a GPU that is shared is offered in no replicas; empty if it is, or is not shared.
func (p *Path) noReplicas(offer *discovery.Offer) string {
	switch rules := &p.opts.Sharing; {
	case offer.Shares == nil:
		return ""
	case offer.Shares.Replicas == 0:
		return "--share-replicas does not say as how many devices"
	case rules.Shares == config.MPS && rules.NoMPS != "":
		return config.SharesFlag + " is one that this node cannot do: " + rules.NoMPS
	}
	return ""
}

// shareOf is what each replica of the GPU takes of it; nil if it is offered in none.
func (p *Path) shareOf(gpu *discovery.GPU, offer *discovery.Offer) *ledger.Share {
	if offer.Shares == nil || p.noReplicas(offer) != "" {
		return nil
	}
	memory, compute := offer.Shares.Replica(gpu.MemoryBytes)
	return &ledger.Share{MemoryBytes: memory, ComputePercent: compute, Setup: config.Settings{}.ForShare(&p.opts.Sharing).Setup()}
}

// migResource is named as NVIDIA's device plugin names it: 1g.10gb+me becomes mig-1g.10gb.me.
func migResource(p *discovery.Partition) string {
	return "nvidia.com/mig-" + strings.ReplaceAll(p.Name(), "+", ".")
}

func newCandidate(resource string, gpu *discovery.GPU, at *ledger.Partition, name, uuid string) candidate {
	return candidate{resource: resource, gpu: gpu, at: at, device: deviceplugin.Device{
		ID: uuid, UUID: uuid, Name: name, NUMANode: gpu.NUMANode,
		CDIName: cdi.DeviceID(hold.UID(ledger.PluginDevice{Resource: resource, ID: uuid}), hold.Request, name),
	}}
}
