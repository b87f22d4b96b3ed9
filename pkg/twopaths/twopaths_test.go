// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package twopaths

import (
	"math"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

const driver = "gpu.nvidia.com"

// pool has devices whose agent has seen so many devices of device plugins; less than none for one that does not say.
type pool []int

func (p pool) Len() int { return len(p) }

func (p pool) Device(i int) *resourceapi.Device {
	devices := []resourceapi.Device{{Name: "gpu"}}
	if p[i] >= 0 {
		Mark(devices, p[i])
	}
	return &devices[0]
}

func TestWhatTheAgentHasNotSeenMayBeAnyDevice(t *testing.T) {
	two, held := Plugins{"nvidia.com/gpu": {Offered: 2}}, Plugins{"nvidia.com/gpu": {Offered: 2, Held: 1}}
	parts := Plugins{"nvidia.com/gpu": {Offered: 2}, "nvidia.com/mig-1g.10gb": {Offered: 7, Held: 1}}
	endless := Plugins{"nvidia.com/gpu": {Offered: math.MaxInt64}, "nvidia.com/nic": {Held: math.MaxInt64}}
	others := Plugins{"amd.com/gpu": {Offered: 2, Held: 1}, "gpu": {Held: 1}, "dia.com/gpu": {Held: 1}}
	for name, test := range map[string]struct {
		plugins      Plugins
		pool         pool
		unseen, held bool
	}{
		"no device plugin": {pool: pool{0, 0}},
		"one has come":     {plugins: two, pool: pool{0, 0}, unseen: true},
		"and a pod, too":   {plugins: held, pool: pool{0, 0}, unseen: true, held: true},
		"all are seen":     {plugins: held, pool: pool{2, 2}, held: true},
		"seen in one slice, and the other is still old":    {plugins: held, pool: pool{2, 0}, unseen: true, held: true},
		"the plugin has gone, a pod has what it gave":      {plugins: Plugins{"nvidia.com/gpu": {Held: 1}}, pool: pool{0}, unseen: true, held: true},
		"two resources, of which one is seen":              {plugins: parts, pool: pool{2}, unseen: true, held: true},
		"more was seen than there is now":                  {plugins: Plugins{"nvidia.com/gpu": {Offered: 1, Held: 1}}, pool: pool{8}, held: true},
		"an agent that does not say":                       {plugins: held, pool: pool{-1}, held: true},
		"a pool without devices":                           {plugins: held, held: true},
		"another vendor's":                                 {plugins: others, pool: pool{0}},
		"more than can be counted":                         {plugins: endless, pool: pool{8}, unseen: true, held: true},
		"a resource of the driver's own domain counts too": {plugins: Plugins{"gpu.nvidia.com/gpu": {Offered: 2}}, pool: pool{0}, unseen: true},
	} {
		t.Run(name, func(t *testing.T) {
			if unseen, held := test.plugins.Unseen(driver, test.pool), test.plugins.held(driver); unseen != test.unseen || held != test.held {
				t.Errorf("unseen %t, held %t; want %t, %t", unseen, held, test.unseen, test.held)
			}
		})
	}
}

func TestAQualifiedAttributeIsTheSame(t *testing.T) {
	n := int64(1)
	device := resourceapi.Device{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{driver + "/" + Listed: {IntValue: &n}}}
	if seen, known := listed(driver, List{&device}); seen != 1 || !known {
		t.Errorf("%d, %t", seen, known)
	}
}

func TestOnlyTheTaintOfADevicePluginIsOne(t *testing.T) {
	for key, value := range map[string]string{driver + "/in-use": "pod", "in-use": TaintValue, "other.com/in-use": TaintValue} {
		if IsTainted(driver, &resourceapi.Device{Taints: []resourceapi.DeviceTaint{{Key: key, Value: value}}}) {
			t.Errorf("%s=%s is taken for it", key, value)
		}
	}
	if !IsTainted(driver, &resourceapi.Device{Taints: []resourceapi.DeviceTaint{{Key: "a"}, {Key: driver + "/in-use", Value: TaintValue}}}) {
		t.Error("it is not found")
	}
}

func TestPodsThatAskForMoreThanCanBeCountedHoldSome(t *testing.T) {
	var count Count
	for range 3 {
		count.Hold(math.MaxInt64)
	}
	if count.Held <= 0 {
		t.Errorf("they hold %d", count.Held)
	}
}

func TestUnhealthyDevicesAreOffered(t *testing.T) {
	for _, test := range []struct{ allocatable, capacity, want int64 }{
		{0, 0, 0}, {2, 2, 2}, {2, 3, 3}, {2, 0, 2}, {0, 3, 0},
	} {
		if got := Offer(test.allocatable, test.capacity); got != (Count{Offered: test.want}) {
			t.Errorf("%d of %d allocatable: %+v, want %d", test.allocatable, test.capacity, got, test.want)
		}
	}
}
