// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"

	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1"
	groupapi "k8s.io/api/scheduling/v1beta1"
	storageapi "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const all = metav1.NamespaceAll

// kinds are all that a snapshot has, in the order in which they are listed. Claims come after pods: a claim made meanwhile for a pod
// that is not there is harmless, and a pod whose claim is not there waits for it.
var kinds = []kind{
	kindOf("nodes", "nodes", "", false, func(o *Objects) *[]*v1.Node { return &o.Nodes },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*v1.NodeList, error) {
			return c.CoreV1().Nodes().List(ctx, opts)
		}, trimNode),
	kindOf("pods", "pods", "", false, func(o *Objects) *[]*v1.Pod { return &o.Pods },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*v1.PodList, error) {
			return c.CoreV1().Pods(all).List(ctx, opts)
		}, trimPod),
	kindOf("namespaces", "namespaces", "", true, func(o *Objects) *[]*v1.Namespace { return &o.Namespaces },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*v1.NamespaceList, error) {
			return c.CoreV1().Namespaces().List(ctx, opts)
		}, nil),
	kindOf("persistentVolumeClaims", "persistentvolumeclaims", "", true,
		func(o *Objects) *[]*v1.PersistentVolumeClaim { return &o.PersistentVolumeClaims },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*v1.PersistentVolumeClaimList, error) {
			return c.CoreV1().PersistentVolumeClaims(all).List(ctx, opts)
		}, nil),
	kindOf("persistentVolumes", "persistentvolumes", "", true, func(o *Objects) *[]*v1.PersistentVolume { return &o.PersistentVolumes },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*v1.PersistentVolumeList, error) {
			return c.CoreV1().PersistentVolumes().List(ctx, opts)
		}, trimVolume),
	kindOf("storageClasses", "storageclasses", "storage.k8s.io", true,
		func(o *Objects) *[]*storageapi.StorageClass { return &o.StorageClasses },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*storageapi.StorageClassList, error) {
			return c.StorageV1().StorageClasses().List(ctx, opts)
		}, trimStorageClass),
	kindOf("csiNodes", "csinodes", "storage.k8s.io", true, func(o *Objects) *[]*storageapi.CSINode { return &o.CSINodes },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*storageapi.CSINodeList, error) {
			return c.StorageV1().CSINodes().List(ctx, opts)
		}, trimCSINode),
	kindOf("podDisruptionBudgets", "poddisruptionbudgets", "policy", true,
		func(o *Objects) *[]*policyapi.PodDisruptionBudget { return &o.PodDisruptionBudgets },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*policyapi.PodDisruptionBudgetList, error) {
			return c.PolicyV1().PodDisruptionBudgets(all).List(ctx, opts)
		}, nil),
	kindOf("priorityClasses", "priorityclasses", "scheduling.k8s.io", true,
		func(o *Objects) *[]*schedulingapi.PriorityClass { return &o.PriorityClasses },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*schedulingapi.PriorityClassList, error) {
			return c.SchedulingV1().PriorityClasses().List(ctx, opts)
		}, nil),
	kindOf("podGroups", "podgroups", "scheduling.k8s.io", true, func(o *Objects) *[]*groupapi.PodGroup { return &o.PodGroups },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*groupapi.PodGroupList, error) {
			return c.SchedulingV1beta1().PodGroups(all).List(ctx, opts)
		}, nil),
	kindOf("resourceSlices", "resourceslices", "resource.k8s.io", false,
		func(o *Objects) *[]*resourceapi.ResourceSlice { return &o.ResourceSlices },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
			return c.ResourceV1().ResourceSlices().List(ctx, opts)
		}, nil),
	kindOf("resourceClaims", "resourceclaims", "resource.k8s.io", false,
		func(o *Objects) *[]*resourceapi.ResourceClaim { return &o.ResourceClaims },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*resourceapi.ResourceClaimList, error) {
			return c.ResourceV1().ResourceClaims(all).List(ctx, opts)
		}, trimClaim),
	kindOf("resourceClaimTemplates", "resourceclaimtemplates", "resource.k8s.io", true,
		func(o *Objects) *[]*resourceapi.ResourceClaimTemplate { return &o.ResourceClaimTemplates },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*resourceapi.ResourceClaimTemplateList, error) {
			return c.ResourceV1().ResourceClaimTemplates(all).List(ctx, opts)
		}, trimTemplate),
	kindOf("deviceClasses", "deviceclasses", "resource.k8s.io", false,
		func(o *Objects) *[]*resourceapi.DeviceClass { return &o.DeviceClasses },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*resourceapi.DeviceClassList, error) {
			return c.ResourceV1().DeviceClasses().List(ctx, opts)
		}, nil),
	kindOf("deviceTaintRules", "devicetaintrules", "resource.k8s.io", true,
		func(o *Objects) *[]*resourceapi.DeviceTaintRule { return &o.DeviceTaintRules },
		func(ctx context.Context, c kubernetes.Interface, opts metav1.ListOptions) (*resourceapi.DeviceTaintRuleList, error) {
			return c.ResourceV1().DeviceTaintRules().List(ctx, opts)
		}, nil),
}
