// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

// A store is fed one slice at a time. A selector then tells which devices of a node it accepts, without regard to who holds them.
func Example() {
	store := inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
	device := func(name, product string) resourceapi.Device {
		return resourceapi.Device{Name: name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"product": {StringValue: ptr.To(product)},
		}}
	}
	store.SetSlice(&resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1-gpus"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("node-1"),
			Pool:    resourceapi.ResourcePool{Name: "node-1", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{device("gpu-0", "H100"), device("gpu-1", "L40S")},
		},
	})

	view := store.View() // stays as it is, whatever the store is fed
	matcher, err := view.Matcher(context.Background(), inventory.MatcherSpec{
		Selectors: []string{`device.attributes["gpu.example.com"].product == "H100"`},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, pool := range view.ForNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}).Pools {
		match, err := matcher.On(context.Background(), pool)
		if err != nil {
			fmt.Println(err)
			return
		}
		for i := range pool.Len() {
			fmt.Println(pool.Device(i).Name, match.Usable.Has(i))
		}
	}
	// Output:
	// gpu-0 true
	// gpu-1 false
}
