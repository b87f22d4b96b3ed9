// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/util/retry"
	"k8s.io/component-helpers/apimachinery/lease"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// The kubelet's own values.
	leaseSeconds  = 40
	leaseInterval = 10 * time.Second
)

// registerNode creates the Node, or takes over the one that is there, and reports it Ready.
func (k *Kubelet) registerNode(ctx context.Context) error {
	nodes := k.client.CoreV1().Nodes()
	labels := map[string]string{
		corev1.LabelHostname:   k.options.Name,
		corev1.LabelOSStable:   "linux",
		corev1.LabelArchStable: runtime.GOARCH,
	}
	for key, value := range k.options.Labels {
		labels[key] = value
	}
	_, err := nodes.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: k.options.Name, Labels: labels},
		Status:     k.nodeStatus(),
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		err = k.writeStatus(ctx, func(node *corev1.Node) { node.Status = k.nodeStatus() })
	}
	if err != nil {
		return fmt.Errorf("registering the node: %w", err)
	}
	return nil
}

func (k *Kubelet) writeStatus(ctx context.Context, change func(*corev1.Node)) error {
	nodes := k.client.CoreV1().Nodes()
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := nodes.Get(ctx, k.options.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(node)
		_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
		return err
	})
}

// offerDevices tells in the node's status what device plugins offer.
func (k *Kubelet) offerDevices(ctx context.Context) {
	k.statusMu.Lock() // or an older one could be written last
	defer k.statusMu.Unlock()
	err := k.writeStatus(ctx, func(node *corev1.Node) {
		status := k.nodeStatus()
		node.Status.Capacity, node.Status.Allocatable = status.Capacity, status.Allocatable
	})
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Telling what device plugins offer")
	}
}

func (k *Kubelet) nodeStatus() corev1.NodeStatus {
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("256"),
		corev1.ResourceMemory:           resource.MustParse("2Ti"),
		corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
		corev1.ResourcePods:             resource.MustParse("1000"),
	}
	for name, quantity := range k.options.Capacity {
		capacity[name] = quantity
	}
	allocatable := maps.Clone(capacity)
	if k.devices != nil {
		all, healthy := k.devices.capacity()
		for name := range all {
			capacity[corev1.ResourceName(name)] = *resource.NewQuantity(all[name], resource.DecimalSI)
			allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(healthy[name], resource.DecimalSI)
		}
	}
	now := metav1.Now()
	condition := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, reason string) corev1.NodeCondition {
		return corev1.NodeCondition{
			Type: kind, Status: status, Reason: reason, Message: "hollow kubelet",
			LastHeartbeatTime: now, LastTransitionTime: now,
		}
	}
	return corev1.NodeStatus{
		Capacity:    capacity,
		Allocatable: allocatable,
		Conditions: []corev1.NodeCondition{
			condition(corev1.NodeMemoryPressure, corev1.ConditionFalse, "KubeletHasSufficientMemory"),
			condition(corev1.NodeDiskPressure, corev1.ConditionFalse, "KubeletHasNoDiskPressure"),
			condition(corev1.NodePIDPressure, corev1.ConditionFalse, "KubeletHasSufficientPID"),
			condition(corev1.NodeReady, corev1.ConditionTrue, "KubeletReady"),
		},
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: k.options.Name}},
		NodeInfo: corev1.NodeSystemInfo{
			OperatingSystem: "linux", Architecture: runtime.GOARCH, ContainerRuntimeVersion: "hollow://1", KubeletVersion: "v1.37.1",
		},
	}
}

// keepLease renews the node's lease, from which the node controller knows that the node is alive.
func (k *Kubelet) keepLease(ctx context.Context) {
	owner := func(l *coordinationv1.Lease) error {
		if len(l.OwnerReferences) > 0 {
			return nil
		}
		node, err := k.client.CoreV1().Nodes().Get(ctx, k.options.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		l.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID,
		}}
		return nil
	}
	lease.NewController(clock.RealClock{}, k.client, k.options.Name, leaseSeconds, nil, leaseInterval,
		k.options.Name, corev1.NamespaceNodeLease, owner).Run(ctx)
}

// wipeResourceSlices deletes the slices that name the node, of every driver.
func (k *Kubelet) wipeResourceSlices(ctx context.Context) error {
	err := k.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, k.options.Name).String(),
	})
	if err != nil {
		return fmt.Errorf("deleting the node's ResourceSlices: %w", err)
	}
	return nil
}
