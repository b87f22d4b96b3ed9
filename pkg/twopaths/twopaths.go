// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package twopaths

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

const (
	// Listed is an attribute of each device of the agent: how many devices of its vendor's device plugins, by ID, the kubelet listed when
	// the agent published the device, and the agent's own that are unhealthy. None of these is the device, or the device has the taint.
	Listed resourceapi.QualifiedName = "devicePluginDevices"
	// TaintName, in the driver's domain, is the taint of a device that is used without a claim, and TaintValue says that another device
	// plugin offers it, or has given it to a pod.
	TaintName  = "in-use"
	TaintValue = "device-plugin"
)

// IsOf tells whether devices of an extended resource may be those of a driver: the vendor's domain is that of both (nvidia.com/gpu,
// gpu.nvidia.com).
func IsOf(driver, resource string) bool {
	domain, _, qualified := strings.Cut(resource, "/")
	return qualified && (domain == driver || strings.HasSuffix(driver, "."+domain))
}

// DriverOf is the driver of an extended resource's vendor, as vendors name theirs: gpu.nvidia.com of nvidia.com/gpu.
func DriverOf(resource string) string {
	domain, _, _ := strings.Cut(resource, "/")
	return "gpu." + domain
}

// Mark writes on each device how many devices of device plugins the agent has seen.
func Mark(devices []resourceapi.Device, listed int) {
	n := int64(listed)
	for i := range devices {
		if devices[i].Attributes == nil {
			devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
		}
		devices[i].Attributes[Listed] = resourceapi.DeviceAttribute{IntValue: &n}
	}
}

// IsTainted tells whether a device plugin has the device, as far as the agent has said.
func IsTainted(driver string, device *resourceapi.Device) bool {
	for i := range device.Taints {
		if device.Taints[i].Key == driver+"/"+TaintName && device.Taints[i].Value == TaintValue {
			return true
		}
	}
	return false
}

// Devices are those of a driver's pool on a node. Each may be asked for by index.
type Devices interface {
	Len() int
	Device(i int) *resourceapi.Device
}

// List is a pool as a slice of its devices.
type List []*resourceapi.Device

// Len implements [Devices].
func (l List) Len() int { return len(l) }

// Device implements [Devices].
func (l List) Device(i int) *resourceapi.Device { return l[i] }

// Tells tells whether the agent says with each device of the pool what it has seen of device plugins.
func Tells(driver string, pool Devices) bool {
	_, known := listed(driver, pool)
	return known
}

// listed is what the agent has said with the device that it has published first. It is unknown if there is no device, or an agent
// that does not say so has published one.
func listed(driver string, pool Devices) (least int64, known bool) {
	for i := range pool.Len() {
		attributes := pool.Device(i).Attributes
		attribute, ok := attributes[Listed]
		if !ok {
			attribute, ok = attributes[resourceapi.QualifiedName(driver)+"/"+Listed]
		}
		if !ok || attribute.IntValue == nil {
			return 0, false
		}
		if i == 0 || *attribute.IntValue < least {
			least = *attribute.IntValue
		}
	}
	return least, pool.Len() > 0
}

// Plugins are what device plugins of a node have, by extended resource, as a scheduler knows it.
type Plugins map[v1.ResourceName]Count

// Count is of one resource: what device plugins Offer, and what is Held by pods that the scheduler has sent there, which the kubelet may
// give devices to at any time.
type Count struct{ Offered, Held int64 }

// Offer is a resource by the node's status. What is not allocatable is unhealthy now, and may recover before anybody hears of it. Where
// nothing can be allocated there may be no device plugin any more: the kubelet keeps its capacity for five minutes.
func Offer(allocatable, capacity int64) Count {
	if allocatable == 0 {
		return Count{}
	}
	return Count{Offered: max(allocatable, capacity)}
}

// most is more devices than any node has. A pod that names its node itself may ask for as many as an int64 can say.
const most = 1 << 32

// Hold adds what one pod holds.
func (c *Count) Hold(devices int64) { c.Held = min(c.Held+min(devices, most), most) }

// KeepFromClaims tells whether claims get no device of the pool: pods have devices from device plugins, and the agent had not seen all of
// these when it published the pool.
func (p Plugins) KeepFromClaims(driver string, pool Devices) bool {
	return p.Unseen(driver, pool) && p.held(driver)
}

// KeepFromPods tells whether pods get no devices of the driver's vendor from device plugins: a claim has one that a plugin offers, too, as
// the agent says or, as long as it has not seen all, may. claimed tells whether a claim has the device of that name.
func (p Plugins) KeepFromPods(driver string, pool Devices, claimed func(device string) bool) bool {
	unseen := p.Unseen(driver, pool)
	for i := range pool.Len() {
		if device := pool.Device(i); (unseen || IsTainted(driver, device)) && claimed(device.Name) {
			return true
		}
	}
	return false
}

// Unseen tells whether device plugins have more devices than the agent had seen when it published the pool: then each device of the pool
// may be one of theirs. Of a pool whose agent does not say what it has seen nothing is known, and nothing is unseen.
func (p Plugins) Unseen(driver string, pool Devices) bool {
	var all int64
	for resource, n := range p {
		if IsOf(driver, string(resource)) {
			all += min(max(n.Offered, n.Held), most)
		}
	}
	if all == 0 {
		return false
	}
	seen, known := listed(driver, pool)
	return known && seen < all
}

// held tells whether pods have devices of the driver's vendor from device plugins.
func (p Plugins) held(driver string) bool {
	for resource, n := range p {
		if IsOf(driver, string(resource)) && n.Held > 0 {
			return true
		}
	}
	return false
}
