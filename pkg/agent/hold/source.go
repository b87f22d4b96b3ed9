// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Source tells of the claims of this package what the API server tells of others.
type Source struct {
	// Driver and Pool are the agent's.
	Driver, Pool string
	Ledger       *ledger.Ledger
	// Checkpoint is the kubelet's, and Pods are those of this node, by the API server.
	Checkpoint func() (*Checkpoint, error)
	Pods       func(context.Context) ([]corev1.Pod, error)
}

// Claim returns the claim of that name, which has no namespace. The error is NotFound if the ledger has none, or if no pod that
// the API server knows, and that has not ended, has the device by the kubelet's checkpoint; any other means that this is not known.
func (s *Source) Claim(ctx context.Context, name string) (*resourceapi.ResourceClaim, error) {
	entry, err := s.find(name)
	if err != nil {
		return nil, err
	}
	if entry == nil {
		return nil, notFound(name)
	}
	checkpoint, err := s.Checkpoint()
	if err != nil {
		return nil, err
	}
	pods := checkpoint.PodsWith(entry.Claim.Plugin)
	if len(pods) == 0 {
		return nil, notFound(name)
	}
	if pods, err = s.Running(ctx, pods); err != nil {
		return nil, fmt.Errorf("which pods have %s: %w", entry.Claim, err)
	}
	if len(pods) == 0 {
		return nil, notFound(name)
	}
	return Claim(s.Driver, s.Pool, entry.Claim.Plugin, entry.Devices[0].Device, entry.Devices[0].Share, pods), nil
}

// Running are those of the pods that the API server knows, and that have not ended.
func (s *Source) Running(ctx context.Context, pods []types.UID) ([]types.UID, error) {
	known, err := s.Pods(ctx)
	return slices.DeleteFunc(slices.Clone(pods), func(uid types.UID) bool {
		return !slices.ContainsFunc(known, func(pod corev1.Pod) bool { return is(&pod, uid) && !ended(&pod) })
	}), err
}

// find returns the entry of that name, nil if there is none.
func (s *Source) find(name string) (*ledger.Entry, error) {
	records, err := s.Ledger.Records()
	if err != nil {
		return nil, err
	}
	for _, record := range records {
		if e := record.Entry; e != nil && e.Claim.Plugin != (ledger.PluginDevice{}) && e.Claim.Name == name && len(e.Devices) > 0 {
			return e, nil
		}
	}
	return nil, nil
}

// is tells whether the kubelet knows the pod by that UID. Of a static pod the API server has a mirror, with a UID of its own.
func is(pod *corev1.Pod, uid types.UID) bool {
	return pod.UID == uid || pod.Annotations[corev1.MirrorPodAnnotationKey] == string(uid)
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func notFound(name string) error {
	return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
}
