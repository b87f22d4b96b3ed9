// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	// MaxAnswer is how many bytes an answer of the kubelet may have. A node with 500 pods of 5 containers comes to some 3 MiB.
	MaxAnswer = 16 << 20
	// Patience is how long the kubelet may take for an answer.
	Patience = 5 * time.Second
)

// ErrNotServed means that the kubelet is too old for the question, or that a feature gate of it is off.
var ErrNotServed = errors.New("the kubelet does not serve it")

// Pod is a pod of the node with what its containers have. Init containers are among these only if they are sidecars: of others the kubelet
// tells nothing.
type Pod struct {
	Namespace, Name string
	Containers      []Container
}

// Container has devices of device plugins, and claims.
type Container struct {
	Name    string
	Devices []Devices
	Claims  []Claim
}

// Devices of a device plugin's resource, such as nvidia.com/gpu, by the plugin's IDs.
type Devices struct {
	Resource string
	IDs      []string
}

// Claim that a container refers to. The kubelet lists all devices of the claim, whichever request of it the container named.
type Claim struct {
	Namespace, Name string
	// Devices are none for a kubelet before 1.31.
	Devices []ClaimDevice
	// CDI are the CDI names of all devices. Which name is of which device cannot be told: the kubelet adds up those of a driver's devices.
	CDI []string
}

// ClaimDevice is a device of a claim. Share is empty for a device that is not shared, and for a kubelet that does not tell.
type ClaimDevice struct{ Driver, Pool, Device, Share string }

// Client asks the kubelet at a socket. Each question has a connection of its own: over a unix socket it costs nothing, and none is
// left that belongs to a kubelet of before a restart.
type Client struct {
	socket   string
	patience time.Duration
}

// New returns a client of the kubelet whose PodResources socket has that absolute path. Nothing is asked yet.
func New(socket string) *Client { return &Client{socket: socket, patience: Patience} }

// List returns the node's pods. A kubelet that has just started knows of none until it has heard from the API server.
func (c *Client) List(ctx context.Context) ([]Pod, error) {
	var answer *api.ListPodResourcesResponse
	err := c.ask(ctx, "List", func(ctx context.Context, kubelet api.PodResourcesListerClient) (err error) {
		answer, err = kubelet.List(ctx, &api.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, err
	}
	pods := make([]Pod, 0, len(answer.GetPodResources()))
	for _, pod := range answer.GetPodResources() {
		pods = append(pods, podOf(pod))
	}
	return pods, nil
}

// Get returns one pod. Of a kubelet without that question all pods are asked for. The error says if there is none of that name.
func (c *Client) Get(ctx context.Context, namespace, name string) (Pod, error) {
	var answer *api.GetPodResourcesResponse
	err := c.ask(ctx, "Get", func(ctx context.Context, kubelet api.PodResourcesListerClient) (err error) {
		answer, err = kubelet.Get(ctx, &api.GetPodResourcesRequest{PodNamespace: namespace, PodName: name})
		return err
	})
	if err == nil {
		return podOf(answer.GetPodResources()), nil
	}
	if !errors.Is(err, ErrNotServed) {
		return Pod{}, fmt.Errorf("pod %s/%s: %w", namespace, name, err)
	}
	pods, err := c.List(ctx)
	if err != nil {
		return Pod{}, err
	}
	for _, pod := range pods {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, nil
		}
	}
	return Pod{}, fmt.Errorf("pod %s/%s: the kubelet does not have it", namespace, name)
}

// Allocatable returns what the node's device plugins offer, whether or not a pod has it, without what is unhealthy. One resource may
// be there several times. The error wraps ErrNotServed for a kubelet before 1.23.
func (c *Client) Allocatable(ctx context.Context) ([]Devices, error) {
	var answer *api.AllocatableResourcesResponse
	err := c.ask(ctx, "GetAllocatableResources", func(ctx context.Context, kubelet api.PodResourcesListerClient) (err error) {
		answer, err = kubelet.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, err
	}
	return devicesOf(answer.GetDevices()), nil
}

func (c *Client) ask(ctx context.Context, method string, question func(context.Context, api.PodResourcesListerClient) error) (err error) {
	conn, err := grpc.NewClient("unix:"+c.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxAnswer)))
	if err != nil {
		return fmt.Errorf("connect to the kubelet at %s: %w", c.socket, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	err = question(ctx, api.NewPodResourcesListerClient(conn))
	switch {
	case err == nil:
		return nil
	case status.Code(err) == codes.Unimplemented:
		return fmt.Errorf("ask the kubelet at %s, PodResources %s: %w: %w", c.socket, method, ErrNotServed, err)
	}
	return fmt.Errorf("ask the kubelet at %s, PodResources %s: %w", c.socket, method, err)
}

func podOf(pod *api.PodResources) Pod {
	p := Pod{Namespace: pod.GetNamespace(), Name: pod.GetName()}
	for _, container := range pod.GetContainers() {
		c := Container{Name: container.GetName(), Devices: devicesOf(container.GetDevices())}
		for _, claim := range container.GetDynamicResources() {
			c.Claims = append(c.Claims, claimOf(claim))
		}
		p.Containers = append(p.Containers, c)
	}
	return p
}

func devicesOf(all []*api.ContainerDevices) []Devices {
	var devices []Devices
	for _, d := range all {
		devices = append(devices, Devices{Resource: d.GetResourceName(), IDs: d.GetDeviceIds()})
	}
	return devices
}

func claimOf(claim *api.DynamicResource) Claim {
	c := Claim{Namespace: claim.GetClaimNamespace(), Name: claim.GetClaimName()}
	seen := map[string]bool{}
	for _, resource := range claim.GetClaimResources() {
		if resource.GetDriverName() != "" {
			c.Devices = append(c.Devices, ClaimDevice{
				Driver: resource.GetDriverName(), Pool: resource.GetPoolName(), Device: resource.GetDeviceName(), Share: resource.GetShareId(),
			})
		}
		for _, cdi := range resource.GetCdiDevices() {
			if name := cdi.GetName(); !seen[name] {
				seen[name] = true
				c.CDI = append(c.CDI, name)
			}
		}
	}
	return c
}
