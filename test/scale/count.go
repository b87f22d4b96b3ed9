// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/pager"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/test/chaos/audit"
)

// settleTimeout is how long controllers may take to release what ended pods had.
const settleTimeout = 5 * time.Minute

// state is what the API has.
type state struct {
	pods   map[types.NamespacedName]*corev1.Pod
	claims map[types.NamespacedName]*resourceapi.ResourceClaim
	slices []*resourceapi.ResourceSlice
}

// wanted is what it is to have.
type expectation struct {
	alive   map[types.NamespacedName]int  // GPUs of each pod that is to be bound
	waiting []types.NamespacedName        // pods that are not to be bound
	free    map[types.NamespacedName]bool // claims that nobody uses
}

// count counts everything anew from the API, until all is as it should be or controllers have had their time.
func (b *bench) count(ctx context.Context) error {
	want := expectation{alive: b.alive, waiting: b.waiting, free: map[types.NamespacedName]bool{}}
	for i := range b.held {
		if h := &b.held[i]; !h.allocated() {
			want.free[types.NamespacedName{Namespace: h.namespace, Name: h.name}] = true
		}
	}
	var found state
	var wrong []string
	err := wait.PollUntilContextTimeout(ctx, 5*time.Second, settleTimeout, true, func(ctx context.Context) (_ bool, err error) {
		if found, err = b.read(ctx); err != nil {
			return false, err
		}
		wrong = found.wrong(want)
		return len(wrong) == 0, nil
	})
	if err != nil && len(wrong) > 0 {
		const most = 20
		err = fmt.Errorf("%w; %d things are not as they should be:\n  %s", err, len(wrong), strings.Join(wrong[:min(most, len(wrong))], "\n  "))
	}
	if err != nil {
		return fmt.Errorf("counting what the API has: %w", err)
	}
	b.figures.number("count: pods bound", float64(len(want.alive)), "")
	b.figures.number("count: pods that wait", float64(len(want.waiting)), "")
	b.figures.number("count: claims", float64(len(found.claims)), "")
	b.figures.number("count: devices allocated", float64(found.allocatedDevices()), "")
	return nil
}

// read reads everything, page by page.
func (b *bench) read(ctx context.Context) (state, error) {
	s := state{pods: map[types.NamespacedName]*corev1.Pod{}, claims: map[types.NamespacedName]*resourceapi.ResourceClaim{}}
	list := func(page pager.ListPageFunc) error {
		return pager.New(page).EachListItem(ctx, metav1.ListOptions{}, func(object runtime.Object) error {
			switch object := object.(type) {
			case *corev1.Pod:
				s.pods[types.NamespacedName{Namespace: object.Namespace, Name: object.Name}] = object
			case *resourceapi.ResourceClaim:
				s.claims[types.NamespacedName{Namespace: object.Namespace, Name: object.Name}] = object
			case *resourceapi.ResourceSlice:
				s.slices = append(s.slices, object)
			}
			return nil
		})
	}
	for _, page := range []pager.ListPageFunc{
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return b.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
		},
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return b.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, o)
		},
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return b.client.ResourceV1().ResourceSlices().List(ctx, o)
		},
	} {
		if err := list(page); err != nil {
			return state{}, err
		}
	}
	return s, nil
}

// wrong says what differs from what should be: a device allocated twice or that is not there, a pod that is not bound or bound where
// its devices are not, a claim that nobody should have.
func (s *state) wrong(want expectation) []string {
	var wrong []string
	add := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }

	users := map[types.NamespacedName][]*corev1.Pod{} // by claim
	for key, pod := range s.pods {
		claim := claimOf(pod)
		users[claim] = append(users[claim], pod)
		count, alive := want.alive[key]
		switch {
		case alive:
			for _, what := range s.wrongPod(pod, claim, count) {
				add("pod %s: %s", key, what)
			}
		case !slices.Contains(want.waiting, key):
			add("pod %s is there and should not be", key)
		case pod.Spec.NodeName != "":
			add("pod %s, which fits on no node, is bound to %s", key, pod.Spec.NodeName)
		}
	}
	for key := range want.alive {
		if s.pods[key] == nil {
			add("pod %s is not there", key)
		}
	}
	var holders []audit.Holder
	for key, claim := range s.claims {
		if len(users[key]) == 0 && !want.free[key] {
			add("claim %s is used by no pod and should not be there", key)
		}
		for _, user := range claim.Status.ReservedFor {
			if !slices.ContainsFunc(users[key], func(pod *corev1.Pod) bool { return pod.UID == user.UID }) {
				add("claim %s is reserved for pod %s (UID %s), which does not use it", key, user.Name, user.UID)
			}
		}
		if claim.Status.Allocation == nil {
			continue
		}
		if len(claim.Status.ReservedFor) == 0 {
			add("claim %s is allocated and reserved for nobody", key)
		}
		holders = append(holders, audit.Holder{Name: key.String(), Results: claim.Status.Allocation.Devices.Results})
	}
	for key := range want.free {
		if s.claims[key] == nil {
			add("claim %s is not there", key)
		}
	}
	for _, overuse := range audit.NewInventory(s.slices).Overuse(holders) {
		add("%s", overuse)
	}
	slices.Sort(wrong)
	return wrong
}

// wrongPod says what is wrong with a pod that should be bound, and use so many GPUs of its node.
func (s *state) wrongPod(pod *corev1.Pod, name types.NamespacedName, count int) []string {
	if pod.Spec.NodeName == "" {
		return []string{"is not bound"}
	}
	claim := s.claims[name]
	if claim == nil {
		return []string{fmt.Sprintf("its claim %s is not there", name)}
	}
	if !slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == pod.UID }) {
		return []string{fmt.Sprintf("claim %s is not reserved for it", name)}
	}
	if claim.Status.Allocation == nil {
		return []string{fmt.Sprintf("claim %s is not allocated", name)}
	}
	var wrong []string
	results := claim.Status.Allocation.Devices.Results
	if len(results) != count {
		wrong = append(wrong, fmt.Sprintf("claim %s has %d devices, not the %d that it asks for", name, len(results), count))
	}
	for _, result := range results {
		if result.Pool != pod.Spec.NodeName {
			wrong = append(wrong, fmt.Sprintf("is on node %s, and claim %s has a device of pool %s", pod.Spec.NodeName, name, result.Pool))
		}
	}
	return wrong
}

// claimOf names the one claim of a pod; its name is empty if it has not been made yet.
func claimOf(pod *corev1.Pod) types.NamespacedName {
	key := types.NamespacedName{Namespace: pod.Namespace}
	if len(pod.Spec.ResourceClaims) == 1 {
		if name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[0]); err == nil && name != nil {
			key.Name = *name
		}
	}
	return key
}

func (s *state) allocatedDevices() int {
	n := 0
	for _, claim := range s.claims {
		if claim.Status.Allocation != nil {
			n += len(claim.Status.Allocation.Devices.Results)
		}
	}
	return n
}
