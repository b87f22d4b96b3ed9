// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Annotation of a Node says how its GPUs are offered, in the words of --advertise, which it replaces. It may change at any time.
const Annotation = "gpu.nvidia.com/advertise"

// Reasons of the Node's events.
const (
	reasonInvalidPaths = "InvalidAdvertise"
	reasonPathsChanged = "AdvertiseChanged"
	reasonWaits        = "GPUWaitsForPath"
	reasonShared       = "GPUNotOffered"
)

// moving is what is known of GPUs that change their path. It is all found out again by an agent that starts: whose GPUs are is in the
// ledger, what slices have in the API server, and no socket of an agent that is gone can give away a device.
type moving struct {
	// flag are the paths without the annotation.
	flag advertise.Paths
	// known tells that the Node has been read: until then nobody knows whether the flag counts, and nothing leaves the slices for good.
	known bool
	// allocating counts the calls for devices of each GPU that the ledger does not have yet.
	allocating map[string]int
	// given counts the calls that have ended.
	given int
	// leaving GPUs have left the device plugin API, and the kubelet may list them still.
	leaving sets.Set[string]
	// changes is how often the paths have changed. With each change GPUs may have come back to the slices.
	changes int
}

// NodeRead takes note of what the Node says, and reports whether GPUs have other paths than before.
func (p *Path) NodeRead(ctx context.Context, node *corev1.Node) (changed bool) {
	p.mu.Lock()
	paths := p.moving.flag
	p.moving.known = true
	p.mu.Unlock()
	text, annotated := node.Annotations[Annotation]
	var err error
	if annotated {
		if paths, err = advertise.Parse(text); err != nil {
			err = fmt.Errorf("node %s, annotation %s: %w; its GPUs stay on the paths that they have", node.Name, Annotation, err)
		}
	}
	if p.opts.Failed("annotation", err) {
		klog.FromContext(ctx).Info("The annotation of the Node is not valid", "reason", err.Error())
		p.opts.Tell(corev1.EventTypeWarning, reasonInvalidPaths, err.Error())
	}
	if err != nil || !p.setPaths(paths) {
		return false
	}
	message := fmt.Sprintf("GPUs are offered as --advertise=%s says, from now on", &paths)
	klog.FromContext(ctx).Info(message)
	p.opts.Tell(corev1.EventTypeNormal, reasonPathsChanged, message)
	return true
}

// setPaths reports whether they are others. A GPU that leaves a path has left it when it returns, for all that is asked later; who has it
// stays.
func (p *Path) setPaths(paths advertise.Paths) (changed bool) {
	node := p.opts.Hardware.Node()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paths.Equal(&paths) {
		return false
	}
	before := p.paths
	p.paths = paths
	p.moving.changes++
	for _, resource := range p.offered.resources {
		for _, device := range resource.Devices {
			p.moving.leaving.Insert(advertise.GPUOf(device.Name))
		}
	}
	if node == nil {
		p.withdrawn = sets.New[string]()
		return true
	}
	for gpu, path := range paths.On(node) {
		if path == advertise.DevicePlugin {
			p.moving.leaving.Delete(gpu)
		} else {
			p.withdrawn.Delete(gpu) // it may come back to the slices
		}
	}
	for gpu, path := range before.On(node) {
		if path == advertise.DRA {
			p.claimed.Insert(gpu) // until the ledger is read
		}
	}
	return true
}

// begin counts the devices as being given away, until end is called with the outcome. A device whose GPU is on another path by now is
// refused, unless a pod has it: the kubelet asks again for the pod's next container.
func (p *Path) begin(resource string, devices []deviceplugin.Device) (end func(error), err error) {
	node := p.opts.Hardware.Node()
	p.mu.Lock()
	paths := p.pathsOf(node)
	for _, device := range devices {
		p.moving.allocating[advertise.GPUOf(device.Name)]++
	}
	p.mu.Unlock()
	end = func(outcome error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.held = p.held.Clone()
		p.moving.given++
		for _, device := range devices {
			gpu := advertise.GPUOf(device.Name)
			if !errors.Is(outcome, deviceplugin.ErrRefused) {
				p.held.Insert(gpu) // until the ledger is read
			}
			if p.moving.allocating[gpu]--; p.moving.allocating[gpu] == 0 {
				delete(p.moving.allocating, gpu)
			}
		}
	}
	for _, device := range devices {
		path, known := paths[advertise.GPUOf(device.Name)]
		if !known || path == advertise.DevicePlugin {
			continue
		}
		of := ledger.PluginDevice{Resource: resource, ID: device.ID}
		switch fresh, err := notRecorded(p.opts.Records, resource, []deviceplugin.Device{device}); {
		case err != nil:
			end(err)
			return nil, fmt.Errorf("whether a pod has %s: %w", of, err)
		case len(fresh) > 0:
			end(deviceplugin.ErrRefused)
			return nil, fmt.Errorf("%w: %s is not offered by the device plugin API on this node any more: its GPU has the path %s",
				deviceplugin.ErrRefused, of, path)
		}
	}
	return end, nil
}

// left forgets devices that have left the API: once the kubelet does not offer them, and no pod has them, a GPU can be offered by claims.
// It reports whether other GPUs than before are kept from claims.
func (p *Path) left(ctx context.Context) (changed bool) {
	p.mu.Lock()
	leaving := p.moving.leaving.Clone()
	p.mu.Unlock()
	if len(leaving) == 0 {
		return false
	}
	answer, err := p.listed.devices(ctx, &p.opts, recently()) // also those that were listed within a minute
	if p.opts.Failed("leaving", err) {
		klog.FromContext(ctx).Info("GPUs wait to be offered on another path until the kubelet says what it offers",
			"devices", sets.List(leaving), "reason", err.Error())
	}
	if err != nil {
		return false
	}
	listed := sets.New(answer.all...)
	changed = p.HeldChanged()
	p.mu.Lock()
	defer p.mu.Unlock()
	for gpu := range leaving {
		isOf := func(d deviceplugin.Device) bool { return advertise.GPUOf(d.Name) == gpu }
		offered := false
		for _, resource := range p.offered.resources {
			for _, device := range resource.Devices {
				offered = offered || isOf(device) && listed.Has(ledger.PluginDevice{Resource: resource.Name, ID: device.ID})
			}
		}
		if offered || p.held.Has(gpu) || p.moving.allocating[gpu] > 0 || !p.moving.leaving.Has(gpu) {
			continue
		}
		p.moving.leaving.Delete(gpu)
		resources := slices.Clone(p.offered.resources)
		for i := range resources {
			resources[i].Devices = slices.DeleteFunc(slices.Clone(resources[i].Devices), isOf)
			resources[i].Table = nil // made again with the next look
		}
		p.offered.resources, p.offered.of = resources, nil
		close(p.offered.changed)
		p.offered.changed = make(chan struct{})
		changed = true
	}
	return changed
}

// waits names the GPUs that are offered by nothing, and, for each that has to wait for its path, who has it.
func (p *Path) waits(ctx context.Context) {
	node := p.opts.Hardware.Node()
	if node == nil {
		return
	}
	p.mu.Lock()
	paths := p.pathsOf(node)
	p.mu.Unlock()
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		var reason error
		for o := range gpu.Offers {
			if why := p.noReplicas(&gpu.Offers[o]); why != "" && paths[gpu.Name] == advertise.DevicePlugin {
				reason = fmt.Errorf("device %s is offered by nothing: it is shared, and on the path %s, and %s", gpu.Name, advertise.DevicePlugin, why)
			}
		}
		if p.opts.Failed("shared "+gpu.Name, reason) {
			klog.FromContext(ctx).Info("A GPU is not offered", "reason", reason.Error())
			p.opts.Tell(corev1.EventTypeWarning, reasonShared, reason.Error())
		}
	}
	for _, gpu := range slices.Sorted(maps.Keys(paths)) {
		path := paths[gpu]
		if path == advertise.None {
			continue
		}
		holders, err := p.opts.Records.Holders(gpu)
		if err != nil {
			continue // which is told by others
		}
		var who []string
		for _, holder := range holders {
			if holder.Entry == nil {
				continue
			}
			if isPlugin := holder.Entry.Claim.Plugin != (ledger.PluginDevice{}); isPlugin != (path == advertise.DevicePlugin) {
				who = append(who, p.nameOf(ctx, holder.Entry))
			}
		}
		var reason error
		if len(who) > 0 {
			slices.Sort(who)
			reason = fmt.Errorf("device %s waits to be offered by %s: %s has it", gpu, path, strings.Join(who, " and "))
		}
		if p.opts.Failed("waits "+gpu, reason) {
			klog.FromContext(ctx).Info("A GPU waits for its path", "reason", reason.Error())
			p.opts.Tell(corev1.EventTypeNormal, reasonWaits, reason.Error())
		}
	}
}

// nameOf is who has what is recorded: a claim, or pods.
func (p *Path) nameOf(ctx context.Context, entry *ledger.Entry) string {
	if entry.Claim.Plugin == (ledger.PluginDevice{}) {
		return fmt.Sprintf("claim %s/%s", entry.Claim.Namespace, entry.Claim.Name)
	}
	if len(entry.Pods) == 0 {
		return "a pod, by " + entry.Claim.Plugin.Resource + ","
	}
	pods, _ := p.source.Pods(ctx) // without their names they have UIDs
	var names []string
	for _, uid := range entry.Pods {
		name := string(uid)
		for i := range pods {
			if pods[i].UID == uid {
				name = pods[i].Namespace + "/" + pods[i].Name
			}
		}
		names = append(names, name)
	}
	return fmt.Sprintf("pod %s, by %s,", strings.Join(names, ", "), entry.Claim.Plugin.Resource)
}
