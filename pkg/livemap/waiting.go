// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/snapshot"
)

// maxMessage bounds what is shown of a scheduler's message, in bytes.
const maxMessage = 1000

// Waiting is a pod that asks for devices and does not run yet.
type Waiting struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Node is where it will run: it has a place, and its containers are not created yet.
	Node      string      `json:"node,omitempty"`
	Scheduler string      `json:"scheduler"`
	Priority  int32       `json:"priority,omitempty"`
	Created   metav1.Time `json:"created"`
	// Asks are the requests of its claims, "2×gpu.nvidia.com", and its extended resources.
	Asks []string `json:"asks"`
	// Group is its PodGroup.
	Group string `json:"group,omitempty"`
	// Reason and Message are what its scheduler says of it.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// waiting is nil if the pod does not wait for devices.
func (c *Cluster) waiting(name string) (Value, error) {
	pod := c.pods[name]
	if pod == nil || pod.Status.Phase != v1.PodPending || pod.DeletionTimestamp != nil {
		return nil, nil
	}
	w := Waiting{
		Namespace: pod.Namespace, Name: pod.Name, Node: pod.Spec.NodeName, Scheduler: pod.Spec.SchedulerName,
		Created: pod.CreationTimestamp, Asks: c.asks(pod),
	}
	if len(w.Asks) == 0 {
		return nil, nil
	}
	if w.Created.IsZero() { // a file may have no time, for which JSON has null, and the page sorts by it
		w.Created = metav1.Unix(0, 0)
	}
	if pod.Spec.Priority != nil {
		w.Priority = *pod.Spec.Priority
	}
	if group := pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		w.Group = *group.PodGroupName
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionFalse {
			w.Reason, w.Message = condition.Reason, strings.ToValidUTF8(condition.Message[:min(len(condition.Message), maxMessage)], "")
		}
	}
	part, err := json.Marshal(&w)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", name, err)
	}
	return Value{part}, nil
}

// asks are the devices that a pod asks for, empty if it asks for none.
func (c *Cluster) asks(pod *v1.Pod) (asks []string) {
	var o snapshot.Objects
	known := 0
	for _, name := range claimsOf(pod) {
		if claim := c.claims[name]; claim != nil {
			known++
			o.ResourceClaims = append(o.ResourceClaims, claim)
		}
	}
	for _, claim := range clusterview.Claims(snapshot.New(o)) {
		asks = append(asks, claim.Requests...)
	}
	if pod.Status.ExtendedResourceClaimStatus != nil { // its claim stands for them
		return asks
	}
	if missing := len(pod.Spec.ResourceClaims) - known; missing > 0 {
		asks = append(asks, fmt.Sprintf("%d×claim that is not there", missing))
	}
	extended := map[v1.ResourceName]int64{}
	for i := range pod.Spec.Containers {
		for name, quantity := range pod.Spec.Containers[i].Resources.Requests {
			if isExtended(name) {
				extended[name] += min(amount.Int64(quantity), math.MaxInt64-extended[name])
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(extended)) {
		asks = append(asks, fmt.Sprintf("%d×%s", extended[name], name))
	}
	return asks
}

// isExtended tells extended resources by their domain, as
// https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/#extended-resources says.
func isExtended(name v1.ResourceName) bool {
	domain, _, found := strings.Cut(string(name), "/")
	return found && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io")
}

// claimsOf are the claims that a pod names, and those that were made for it, as namespace/name.
func claimsOf(pod *v1.Pod) (names []string) {
	for i := range pod.Spec.ResourceClaims {
		if name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i]); err == nil && name != nil {
			names = append(names, pod.Namespace+"/"+*name)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, pod.Namespace+"/"+extended.ResourceClaimName)
	}
	return names
}
