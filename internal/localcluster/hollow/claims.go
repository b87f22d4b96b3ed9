// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/draclient"
)

// claimManager prepares and unprepares claims under the kubelet's rules (pkg/kubelet/cm/dra/manager.go): a claim is prepared for the
// first pod that needs it and unprepared when the last one has ended; once a plugin has been asked to prepare, it is asked to unprepare,
// also if it had failed; and while a claim is being unprepared no other pod can join it.
type claimManager struct {
	client  kubernetes.Interface
	plugins *draclient.Registry

	mu sync.Mutex // not held over a call
	// Claims that a plugin may have prepared.
	held map[types.NamespacedName]*heldClaim
}

type heldClaim struct {
	claim *drav1.Claim
	// Key: driver. Drivers that have not prepared yet have an empty list.
	devices     map[string][]*drav1.Device
	pods        sets.Set[types.UID]
	prepared    bool
	unpreparing bool
}

func newClaimManager(client kubernetes.Interface, plugins *draclient.Registry) *claimManager {
	return &claimManager{client: client, plugins: plugins, held: map[types.NamespacedName]*heldClaim{}}
}

// prepare makes the claims of a pod usable on this node.
func (m *claimManager) prepare(ctx context.Context, pod *corev1.Pod) error {
	claims, err := m.fetch(ctx, pod)
	if err != nil {
		return err
	}
	// Before anything is recorded: without a plugin the pod shall be deletable without one.
	clients := map[string]*draclient.Client{}
	for _, claim := range claims {
		for _, driver := range drivers(claim) {
			if clients[driver], err = m.plugins.Get(driver); err != nil {
				return fmt.Errorf("claim %s: %w", claim.Name, err)
			}
		}
	}
	batches, err := m.hold(pod.UID, claims)
	if err != nil {
		return err
	}
	for driver, batch := range batches {
		if err := m.prepareWith(ctx, clients[driver], batch); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, claim := range claims {
		m.held[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}].prepared = true
	}
	return nil
}

// fetch reads the pod's claims and checks that it may use them.
func (m *claimManager) fetch(ctx context.Context, pod *corev1.Pod) ([]*resourceapi.ResourceClaim, error) {
	var claims []*resourceapi.ResourceClaim
	for _, podClaim := range podClaims(pod) {
		name, mustCheckOwner, err := resourceclaim.Name(pod, &podClaim)
		if err != nil {
			return nil, err
		}
		if name == nil {
			continue // the pod needs none
		}
		claim, err := m.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, *name, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("fetching ResourceClaim %s: %w", *name, err)
		}
		if mustCheckOwner {
			if err := resourceclaim.IsForPod(pod, claim, false); err != nil {
				return nil, err
			}
		}
		if !resourceclaim.IsReservedForPod(pod, claim, false) {
			return nil, fmt.Errorf("ResourceClaim %s (%s) is not reserved for pod %s (%s)", claim.Name, claim.UID, pod.Name, pod.UID)
		}
		if claim.Status.Allocation == nil {
			return nil, fmt.Errorf("ResourceClaim %s (%s) is not allocated", claim.Name, claim.UID)
		}
		claims = append(claims, claim)
	}
	return claims, nil
}

// hold records that the pod uses the claims, and returns those that are still to be prepared, by driver.
func (m *claimManager) hold(pod types.UID, claims []*resourceapi.ResourceClaim) (map[string][]*drav1.Claim, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	batches := map[string][]*drav1.Claim{}
	for _, claim := range claims {
		name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
		h := m.held[name]
		switch {
		case h == nil:
			h = &heldClaim{
				claim:   &drav1.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)},
				devices: map[string][]*drav1.Device{},
				pods:    sets.New[types.UID](),
			}
			for _, driver := range drivers(claim) {
				h.devices[driver] = nil
			}
			m.held[name] = h
		case h.claim.Uid != string(claim.UID):
			return nil, fmt.Errorf("an old ResourceClaim %s with UID %s is still prepared", claim.Name, h.claim.Uid)
		case h.unpreparing:
			return nil, fmt.Errorf("ResourceClaim %s is being unprepared", claim.Name)
		}
		h.pods.Insert(pod)
		if h.prepared {
			continue
		}
		for driver := range h.devices {
			batches[driver] = append(batches[driver], h.claim)
		}
	}
	return batches, nil
}

func (m *claimManager) prepareWith(ctx context.Context, client *draclient.Client, batch []*drav1.Claim) error {
	answers, err := client.Prepare(ctx, batch)
	if err != nil {
		return err
	}
	var errs []error
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, claim := range batch {
		answer := answers[claim.Uid]
		if answer.Error != "" {
			errs = append(errs, fmt.Errorf("preparing ResourceClaim %s: %s", claim.Name, answer.Error))
			continue
		}
		name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
		m.held[name].devices[client.Plugin().Driver] = answer.Devices
	}
	return errors.Join(errs...)
}

// unprepare ends a pod's use of its claims. It can be called again, also for a pod that used none.
func (m *claimManager) unprepare(ctx context.Context, pod types.UID) error {
	for driver, batch := range m.letGo(pod) {
		client, err := m.plugins.Get(driver)
		if err != nil {
			return fmt.Errorf("unpreparing: %w", err)
		}
		answers, err := client.Unprepare(ctx, batch)
		if err != nil {
			return err
		}
		for _, claim := range batch {
			if failure := answers[claim.Uid].GetError(); failure != "" {
				return fmt.Errorf("unpreparing ResourceClaim %s: %s", claim.Name, failure)
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, h := range m.held {
		if h.unpreparing && h.pods.Has(pod) {
			delete(m.held, name)
		}
	}
	return nil
}

// letGo forgets the pod where others use the claim too, and returns the claims that it was the last to use, by driver.
func (m *claimManager) letGo(pod types.UID) map[string][]*drav1.Claim {
	m.mu.Lock()
	defer m.mu.Unlock()
	batches := map[string][]*drav1.Claim{}
	for _, h := range m.held {
		if !h.pods.Has(pod) {
			continue
		}
		if h.pods.Len() > 1 {
			h.pods.Delete(pod)
			continue
		}
		h.unpreparing = true
		for driver := range h.devices {
			batches[driver] = append(batches[driver], h.claim)
		}
	}
	return batches
}

// cdiDevices lists the CDI devices that a container gets, each once.
func (m *claimManager) cdiDevices(pod *corev1.Pod, container *corev1.Container) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []string
	add := func(claim, request string) {
		h := m.held[types.NamespacedName{Namespace: pod.Namespace, Name: claim}]
		if h == nil {
			return
		}
		for _, driver := range slices.Sorted(maps.Keys(h.devices)) {
			for _, device := range h.devices[driver] {
				if request == "" || len(device.RequestNames) == 0 || slices.Contains(device.RequestNames, request) {
					ids = append(ids, device.CdiDeviceIds...)
				}
			}
		}
	}
	for _, used := range container.Resources.Claims {
		i := slices.IndexFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == used.Name })
		if i < 0 {
			return nil, fmt.Errorf("container %s uses claim %s, which the pod does not have", container.Name, used.Name)
		}
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, err
		}
		if name != nil {
			add(*name, used.Request)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		for _, mapping := range extended.RequestMappings {
			if mapping.ContainerName == container.Name {
				add(extended.ResourceClaimName, mapping.RequestName)
			}
		}
	}
	return uniqueStrings(ids), nil
}

// podClaims are the claims of the pod's spec and the one that was made for its extended resources.
func podClaims(pod *corev1.Pod) []corev1.PodResourceClaim {
	claims := slices.Clone(pod.Spec.ResourceClaims)
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		claims = append(claims, corev1.PodResourceClaim{ResourceClaimName: &extended.ResourceClaimName})
	}
	return claims
}

// drivers lists the drivers of a claim's devices, each once.
func drivers(claim *resourceapi.ResourceClaim) []string {
	var names []string
	for _, result := range claim.Status.Allocation.Devices.Results {
		names = append(names, result.Driver)
	}
	return uniqueStrings(names)
}

// uniqueStrings removes what comes again, and keeps the order.
func uniqueStrings(list []string) []string {
	seen := sets.New[string]()
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool {
		if seen.Has(s) {
			return true
		}
		seen.Insert(s)
		return false
	})
}
