// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
	"stowage.dev/stowage/pkg/twopaths"
)

// Devices are what all device plugins of the node offer and, if that is asked for, too, what pods have from them; each may be there several
// times.
type Devices func(ctx context.Context, ofPods bool) ([]ledger.PluginDevice, error)

// DevicesAt returns the source of these that is the kubelet's PodResources socket. A kubelet without a socket has none; one that does not
// tell what is offered (before 1.23) tells what pods have.
func DevicesAt(socket string) Devices {
	kubelet := podresources.New(socket)
	return func(ctx context.Context, ofPods bool) (devices []ledger.PluginDevice, err error) {
		if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		offered, err := kubelet.Allocatable(ctx)
		if err != nil && !errors.Is(err, podresources.ErrNotServed) {
			return nil, err
		}
		var pods []podresources.Pod
		if ofPods {
			if pods, err = kubelet.List(ctx); err != nil {
				return nil, err
			}
		}
		for _, pod := range pods {
			for _, container := range pod.Containers {
				offered = append(offered, container.Devices...)
			}
		}
		for _, of := range offered {
			for _, id := range of.IDs {
				devices = append(devices, ledger.PluginDevice{Resource: of.Resource, ID: id})
			}
		}
		return devices, nil
	}
}

const (
	// askAge is how long an answer is good for: the kubelet answers 100 questions a second, and refuses what is beyond 10 at once.
	askAge = time.Second
	// forgetAfter is how long a device counts that the kubelet does not list any more, in answers that follow one another. One that has just
	// started lists none until its device plugins have registered again, and no pod until it has heard from the API server.
	forgetAfter = time.Minute
	// maxID bounds what is kept of an ID. Those of GPUs have some 45 bytes.
	maxID = 253
)

// listed is what the kubelet has said last of device plugins.
type listed struct {
	mu  sync.Mutex
	at  time.Time // when it was asked last; zero before
	err error
	// missing are the devices that count, each with the time since which it has not been listed: zero if it is.
	missing map[ledger.PluginDevice]time.Time
	// ofDriver are those of the driver's vendor that are listed now. More would hide others that come while some are missing.
	ofDriver sets.Set[ledger.PluginDevice]
}

// answer is what the kubelet says of device plugins.
type answer struct {
	// all count, in order; now are those of the driver's vendor that are listed now.
	all []ledger.PluginDevice
	now sets.Set[ledger.PluginDevice]
}

// devices are those of all device plugins. The kubelet is asked unless it was after that time: who asks meanwhile gets the same answer.
func (l *listed) devices(ctx context.Context, opts *Options, since time.Time) (a answer, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.at.After(since) {
		l.at = time.Now()
		var devices []ledger.PluginDevice
		devices, l.err = opts.Devices(context.WithoutCancel(ctx), true) // which serves others, too, and has a time of its own
		l.take(devices, opts.Driver)
	}
	if l.err != nil {
		return a, l.err
	}
	return answer{all: inOrder(sets.KeySet(l.missing)), now: l.ofDriver}, nil
}

// offering are those that device plugins offer now, and those that counted when the kubelet was asked last what pods have. It is not asked
// that while it gives devices to a pod: to answer, it drops pods that have ended, and adds up anew what it has given, without what it is
// about to give, which the next pod gets then, too.
func (l *listed) offering(ctx context.Context, opts *Options) (a answer, err error) {
	devices, err := opts.Devices(ctx, false)
	if err != nil {
		return a, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := counting(devices, opts.Driver)
	return answer{all: inOrder(now.Union(sets.KeySet(l.missing))), now: ofDriver(now, opts.Driver)}, nil
}

func inOrder(devices sets.Set[ledger.PluginDevice]) []ledger.PluginDevice {
	return slices.SortedFunc(maps.Keys(devices), func(a, b ledger.PluginDevice) int { return cmp.Compare(a.String(), b.String()) })
}

// counting are the devices that may be GPUs, or are of the driver's vendor, each once.
func counting(devices []ledger.PluginDevice, driver string) sets.Set[ledger.PluginDevice] {
	count := sets.New[ledger.PluginDevice]()
	for _, device := range devices {
		if advertise.MayBeGPU(device) || twopaths.IsOf(driver, device.Resource) {
			device.ID = device.ID[:min(len(device.ID), maxID)]
			count.Insert(device)
		}
	}
	return count
}

func ofDriver(devices sets.Set[ledger.PluginDevice], driver string) sets.Set[ledger.PluginDevice] {
	of := sets.New[ledger.PluginDevice]()
	for device := range devices {
		if twopaths.IsOf(driver, device.Resource) {
			of.Insert(device)
		}
	}
	return of
}

// anew asks the kubelet for all.
func (l *listed) anew(ctx context.Context, opts *Options) (answer, error) {
	return l.devices(ctx, opts, time.Now())
}

// recently is when the kubelet was asked for an answer that is just too old.
func recently() time.Time { return time.Now().Add(-askAge) }

// take takes note of the answer, or of its error: then it is not known what there is, and the kubelet that answers next may have just
// started.
func (l *listed) take(devices []ledger.PluginDevice, driver string) {
	if l.err != nil {
		for device := range l.missing {
			l.missing[device] = time.Time{}
		}
		return
	}
	now := counting(devices, driver)
	for device := range now {
		l.missing[device] = time.Time{}
	}
	l.ofDriver = ofDriver(now, driver) // who has the one before reads it
	for device, since := range l.missing {
		switch {
		case now.Has(device):
		case since.IsZero():
			l.missing[device] = l.at
		case l.at.Sub(since) >= forgetAfter:
			delete(l.missing, device)
		}
	}
}

// OfOthers returns the resource by which another device plugin of the node offers each GPU, or has given it to a pod, by the GPU's name. A
// device of a resource of GPUs that is none of those that are known may be any of them. listed is how many devices of the driver's vendor
// the kubelet lists now, of all device plugins, our own, also unhealthy ones, and those of NICs, too.
func (p *Path) OfOthers(ctx context.Context) (resources map[string]string, listed int, err error) {
	node := p.opts.Hardware.Node()
	if node == nil {
		return nil, 0, nil
	}
	answer, err := p.listed.devices(ctx, &p.opts, recently())
	if err != nil {
		return nil, 0, fmt.Errorf("whether a device plugin offers the node's GPUs: %w", err)
	}
	resources, err = p.ofOthers(ctx, node, answer, nil)
	if err != nil {
		return nil, 0, err
	}
	return resources, len(answer.now) + p.unhealthy(answer.now), nil
}

// ofOthers looks for no device of the set.
func (p *Path) ofOthers(
	ctx context.Context, node *discovery.Node, answer answer, but sets.Set[ledger.PluginDevice],
) (resources map[string]string, err error) {
	devices := slices.DeleteFunc(answer.all, func(d ledger.PluginDevice) bool { return !advertise.MayBeGPU(d) || but.Has(d) })
	if len(devices) > 0 {
		ours, err := p.ours(node, answer.now)
		if err != nil {
			return nil, err
		}
		devices = slices.DeleteFunc(devices, ours.Has)
	}
	resources, unknown := advertise.OfPlugins(node, devices)
	var reason error
	if len(unknown) > 0 {
		reason = fmt.Errorf("a device plugin offers %.120q, which is none of the GPUs that are known: it may be any of them", unknown[0].String())
		for i := range node.GPUs {
			if resources[node.GPUs[i].Name] == "" {
				resources[node.GPUs[i].Name] = unknown[0].Resource
			}
		}
	}
	if p.opts.Failed("unknown device", reason) {
		klog.FromContext(ctx).Info("No GPU is given to claims that a device plugin may offer", "reason", reason.Error())
	}
	return resources, nil
}

// unhealthy are how many of our own devices the kubelet has and does not list. They are in the node's capacity, and in no slice: if
// nobody told of them, one that is ill would be the device of another plugin, for as long as it is ill. Of a resource of which the
// kubelet lists none of ours it has none, or nothing can be allocated. If it lists others, too, another plugin has registered the
// resource, and the kubelet has that one's devices.
func (p *Path) unhealthy(listed sets.Set[ledger.PluginDevice]) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, resource := range p.offered.resources {
		known, of := 0, 0 // of those that are listed of the resource
		for device := range listed {
			if device.Resource == resource.Name {
				of++
			}
		}
		isListed := func(d deviceplugin.Device) bool {
			return listed.Has(ledger.PluginDevice{Resource: resource.Name, ID: d.ID})
		}
		unlisted := 0
		for _, device := range resource.Devices {
			switch {
			case isListed(device):
				known++
			case !device.Healthy:
				unlisted++
			}
		}
		if known > 0 && known == of {
			n += unlisted
		}
	}
	return n
}

// ours are the devices of our own device plugin: what it offers, or would, or another agent of the node did before an update, and
// what it has given to pods. One that is listed now although a claim holds its place on the GPU, or a pod by another resource, and that
// is not recorded, is none of these. Here it is unhealthy then, and given to nobody: a plugin that has registered the same resource offers
// it, or has given it away.
func (p *Path) ours(node *discovery.Node, now sets.Set[ledger.PluginDevice]) (sets.Set[ledger.PluginDevice], error) {
	ours, places := sets.New[ledger.PluginDevice](), map[ledger.PluginDevice]candidate{}
	p.mu.Lock()
	offered, paths := p.offered.resources, p.paths
	p.mu.Unlock()
	for _, resource := range offered {
		for _, d := range resource.Devices {
			of := ledger.PluginDevice{Resource: resource.Name, ID: d.ID}
			ours.Insert(of)
			if gpu := advertise.GPUOf(d.Name); gpu == d.Name { // where a part was that is not there any more is not known
				places[of] = candidate{resource: resource.Name, gpu: &discovery.GPU{Name: gpu}, device: d}
			}
		}
	}
	for _, c := range p.candidates(node, &paths) {
		of := ledger.PluginDevice{Resource: c.resource, ID: c.device.ID}
		ours.Insert(of)
		places[of] = c
	}
	records, err := p.opts.Records.Records()
	if err != nil {
		return nil, err
	}
	recorded := sets.New[ledger.PluginDevice]()
	for _, record := range records {
		if record.Entry == nil {
			continue
		}
		recorded.Insert(record.Entry.Claim.Plugin)
		for device := range now {
			at, known := places[device]
			if known && record.Entry.Claim.Plugin.Resource != device.Resource && !isFree(at, []*ledger.Record{record}) {
				ours.Delete(device)
			}
		}
	}
	return ours.Union(recorded), nil
}

// asking is how the kubelet is asked: (*listed).offering or (*listed).anew.
type asking = func(*listed, context.Context, *Options) (answer, error)

// refuse returns an error if another device plugin of the node offers the GPUs of the devices, or has given them to a pod; one that
// is [deviceplugin.ErrRefused], if that is known. A plugin does not ask who has a GPU, and the kubelet asks nobody about the devices
// of others.
func (p *Path) refuse(ctx context.Context, ask asking, resource string, devices []deviceplugin.Device) error {
	node := p.opts.Hardware.Node()
	if len(devices) == 0 || node == nil {
		return nil
	}
	answer, err := ask(&p.listed, ctx, &p.opts)
	if err != nil {
		return fmt.Errorf("whether another device plugin offers the node's GPUs: %w", err)
	}
	own := sets.New[ledger.PluginDevice]()
	for _, device := range devices {
		own.Insert(ledger.PluginDevice{Resource: resource, ID: device.ID})
	}
	others, err := p.ofOthers(ctx, node, answer, own)
	if err != nil {
		return err
	}
	for _, device := range devices {
		if other := others[advertise.GPUOf(device.Name)]; other != "" {
			return fmt.Errorf("%w: another device plugin of this node offers the GPU of device %s as %s: a GPU has one path",
				deviceplugin.ErrRefused, device.Name, other)
		}
	}
	return nil
}

// Refuse says by UID why claims must not be prepared: a GPU of theirs is on another path, or another device plugin offers it. Claims that
// are prepared stay so, and who has admin access keeps the GPU from nobody.
func (p *Path) Refuse(ctx context.Context, claims []*resourceapi.ResourceClaim) (refused map[types.UID]error) {
	refused = map[types.UID]error{}
	others, _, err := p.OfOthers(ctx)
	node := p.opts.Hardware.Node()
	p.mu.Lock()
	paths := p.pathsOf(node)
	p.mu.Unlock()
	for _, claim := range claims {
		why := errors.Join(p.otherPath(claim, paths), p.otherPlugin(claim, others, err))
		if why == nil {
			continue
		}
		if record, err := p.opts.Records.Get(claim.UID); record == nil || err != nil {
			refused[claim.UID] = errors.Join(why, err)
		}
	}
	return refused
}

// devicesOf are those of the claim that are this node's and for the claim alone.
func (p *Path) devicesOf(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(claim.Status.Allocation.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver != p.opts.Driver || r.Pool != p.opts.Node || r.AdminAccess != nil && *r.AdminAccess
	})
}

func (p *Path) otherPath(claim *resourceapi.ResourceClaim, paths map[string]advertise.Path) error {
	for _, result := range p.devicesOf(claim) {
		gpu := advertise.GPUOf(result.Device)
		if path, known := paths[gpu]; known && path != advertise.DRA {
			return fmt.Errorf("claim %s/%s, request %s: device %s is not offered by claims on this node any more: --advertise has %s for GPU %s",
				claim.Namespace, claim.Name, result.Request, result.Device, path, gpu)
		}
	}
	return nil
}

func (p *Path) otherPlugin(claim *resourceapi.ResourceClaim, others map[string]string, unknown error) error {
	for _, result := range p.devicesOf(claim) {
		if unknown != nil {
			return fmt.Errorf("claim %s/%s, request %s, device %s: %w", claim.Namespace, claim.Name, result.Request, result.Device, unknown)
		}
		if resource := others[advertise.GPUOf(result.Device)]; resource != "" {
			return fmt.Errorf("claim %s/%s, request %s: device %s is of a GPU that another device plugin of this node offers as %s: a GPU "+
				"has one path",
				claim.Namespace, claim.Name, result.Request, result.Device, resource)
		}
	}
	return nil
}
