// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

const (
	// readyTimeout covers the pulling up of the network on a machine busy with other things.
	readyTimeout = 2 * time.Minute
	// removeTimeout is for an API server that answers; whether it does is asked first.
	removeTimeout = 30 * time.Second

	pollInterval = 100 * time.Millisecond
)

// provideAddress does what a cloud provider does for a new node: it gives it an address, at which the API server reaches the
// kubelet, and removes the taint that waits for that.
func (n *Node) provideAddress(ctx context.Context) error {
	nodes := n.cluster.AdminClient().CoreV1().Nodes()
	err := n.poll(ctx, "the kubelet to register", func(ctx context.Context) (bool, error) {
		node, err := nodes.Get(ctx, n.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err == nil {
			node.Status.Addresses = []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: "127.0.0.1"},
				{Type: corev1.NodeHostName, Address: n.name},
			}
			_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
		}
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("giving the node its address: %w", err)
	}
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := nodes.Get(ctx, n.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == cloudproviderapi.TaintExternalCloudProvider
		})
		_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("removing the node's taint %s: %w", cloudproviderapi.TaintExternalCloudProvider, err)
	}
	return nil
}

// waitReady waits until the kubelet has reported the node Ready, at the given time or after it.
func (n *Node) waitReady(ctx context.Context, since time.Time) error {
	return n.poll(ctx, "the node to be Ready", func(ctx context.Context) (bool, error) {
		node, err := n.cluster.AdminClient().CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		ready := readyCondition(node)
		switch {
		case ready == nil, ready.LastHeartbeatTime.Time.Before(since.Truncate(time.Second)):
			return false, nil
		case ready.Status != corev1.ConditionTrue:
			return false, nil
		}
		return true, nil
	})
}

// poll waits for a condition, and gives up when the kubelet ends.
func (n *Node) poll(ctx context.Context, what string, condition wait.ConditionWithContextFunc) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, readyTimeout, true, func(ctx context.Context) (bool, error) {
		if err := n.kubelet.Err(); err != nil {
			return false, err
		}
		return condition(ctx)
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("waited %s for %s in vain; log %s ends with:\n%s", readyTimeout, what,
			n.kubelet.LogPath(), localcluster.LogTail(n.kubelet.LogPath()))
	}
	if err != nil {
		return fmt.Errorf("waiting for %s: %w", what, err)
	}
	return nil
}

// removeObjects removes the node and its pods from the API server: nobody will ever report on them again. Without an API server
// there is nothing to do.
func (n *Node) removeObjects() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	client := n.cluster.AdminClient()
	if client == nil {
		return nil
	}
	if _, err := client.Discovery().ServerVersion(); err != nil {
		return nil
	}
	pods, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", n.name).String(),
	})
	if err != nil {
		return fmt.Errorf("listing the pods of the node: %w", err)
	}
	var errs []error
	for _, pod := range pods.Items {
		err := client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0),
			Preconditions:      metav1.NewUIDPreconditions(string(pod.UID)),
		})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("deleting pod %s/%s of the node: %w", pod.Namespace, pod.Name, err))
		}
	}
	if err := client.CoreV1().Nodes().Delete(ctx, n.name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		errs = append(errs, fmt.Errorf("deleting the Node object: %w", err))
	}
	return errors.Join(errs...)
}
