// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"

	"stowage.dev/stowage/pkg/topology"
)

// Device is one that the kubelet can give to a container.
type Device struct {
	// ID by which the kubelet and its PodResources service know it: the UUID of a GPU, and of its nth replica <UUID>::<n>.
	ID string
	// Name in ResourceSlices, and in the agent.
	Name string
	// Healthy devices are given to containers.
	Healthy bool
	// NUMANode is nil where it is not known.
	NUMANode *int
	// CDIName is the qualified name by which the container runtime gets it, the same at any time.
	CDIName string
	// UUID is what NVIDIA's container runtime knows it by. All replicas of a GPU have the same.
	UUID string
	// GPU is the index in the resource's Table.
	GPU int
}

// Resource is what pods ask for by a name and a number.
type Resource struct {
	// Name such as "nvidia.com/gpu".
	Name string
	// Devices in an order that stays.
	Devices []Device
	// Table tells how close the GPUs of the devices are; nil if that is not known.
	Table *topology.Table
	// Shared: the devices are replicas, of which a container should get those of the GPUs that have fewest in use.
	Shared bool
	// Single: a container can use no more than one of them.
	Single bool
}

// Inventory is what there is to be had. It may be asked concurrently.
type Inventory interface {
	// Resources are all of them. What they are must not be changed. Changed is closed when they have become others. A device
	// that has been there stays, unhealthy if it is lost: the kubelet may have given it to a pod.
	Resources() (resources []Resource, changed <-chan struct{})
}

// Holder makes devices ready and remembers who has them. It may be called concurrently, also for the same devices.
type Holder interface {
	// Allocated takes note that the kubelet gives the devices to a container, and makes them ready if that can be done at once. That
	// they are held already is no error: the kubelet asks again. An error that is not ErrRefused may pass.
	Allocated(ctx context.Context, resource string, devices []Device) error
	// Starting makes the devices ready for a container that is about to start. After an error it does not start, and the kubelet
	// asks again.
	Starting(ctx context.Context, resource string, devices []Device) error
}

// ErrRefused says that a device must not be given to a container: somebody else has it.
var ErrRefused = errors.New("the device must not be used")
