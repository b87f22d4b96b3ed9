// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	storageapi "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// keptAnnotations are those that a decision depends on.
var keptAnnotations = map[string]bool{
	"resource.kubernetes.io/pod-claim-name":          true,
	"resource.kubernetes.io/extended-resource-claim": true,
	"volume.kubernetes.io/selected-node":             true,
	"storageclass.kubernetes.io/is-default-class":    true,
	"pv.kubernetes.io/bind-completed":                true,
	v1.MirrorPodAnnotationKey:                        true,
	"pv.kubernetes.io/bound-by-controller":           true,
	"storage.alpha.kubernetes.io/migrated-plugins":   true,
}

// trimMeta drops what no decision depends on.
func trimMeta(object metav1.Object) {
	object.SetManagedFields(nil)
	var kept map[string]string
	for key, value := range object.GetAnnotations() {
		if keptAnnotations[key] {
			if kept == nil {
				kept = map[string]string{}
			}
			kept[key] = value
		}
	}
	object.SetAnnotations(kept)
}

func trimNode(node *v1.Node) {
	node.Spec.ProviderID, node.Spec.PodCIDR, node.Spec.PodCIDRs = "", "", nil // of clouds it has the project and the machine
	node.Status.Images, node.Status.VolumesInUse, node.Status.VolumesAttached = nil, nil, nil
	node.Status.Addresses, node.Status.NodeInfo.MachineID, node.Status.NodeInfo.SystemUUID, node.Status.NodeInfo.BootID = nil, "", "", ""
}

// trimPod leaves what a scheduler reads, and the state in which the containers are. What containers are told, which may be secret, goes.
func trimPod(pod *v1.Pod) {
	spec := &pod.Spec
	for _, containers := range [][]v1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			containers[i] = trimContainer(&containers[i])
		}
	}
	spec.EphemeralContainers, spec.ImagePullSecrets, spec.HostAliases, spec.DNSConfig, spec.SecurityContext = nil, nil, nil, nil, nil
	var volumes []v1.Volume
	for _, volume := range spec.Volumes {
		source := v1.VolumeSource{PersistentVolumeClaim: volume.PersistentVolumeClaim, Ephemeral: volume.Ephemeral}
		if source.Ephemeral != nil && source.Ephemeral.VolumeClaimTemplate != nil {
			source.Ephemeral.VolumeClaimTemplate.Annotations = nil
		}
		if source.PersistentVolumeClaim != nil || source.Ephemeral != nil {
			volumes = append(volumes, v1.Volume{Name: volume.Name, VolumeSource: source})
		}
	}
	spec.Volumes = volumes
	status := &pod.Status
	status.HostIP, status.HostIPs, status.PodIP, status.PodIPs, status.EphemeralContainerStatuses = "", nil, "", nil, nil
	for _, statuses := range [][]v1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses} {
		for i := range statuses {
			statuses[i] = trimStatus(&statuses[i])
		}
	}
}

func trimContainer(c *v1.Container) v1.Container {
	return v1.Container{Name: c.Name, Ports: hostPorts(c.Ports), Resources: c.Resources, RestartPolicy: c.RestartPolicy}
}

func hostPorts(ports []v1.ContainerPort) (kept []v1.ContainerPort) {
	for _, port := range ports {
		if port.HostPort != 0 {
			kept = append(kept, port)
		}
	}
	return kept
}

func trimStatus(s *v1.ContainerStatus) v1.ContainerStatus {
	trimmed := v1.ContainerStatus{
		Name: s.Name, Ready: s.Ready, RestartCount: s.RestartCount, Started: s.Started,
		Resources: s.Resources, AllocatedResources: s.AllocatedResources, // what a scheduler counts while a resize waits
	}
	if s.State.Waiting != nil {
		trimmed.State.Waiting = &v1.ContainerStateWaiting{Reason: s.State.Waiting.Reason}
	}
	if s.State.Running != nil {
		trimmed.State.Running = &v1.ContainerStateRunning{StartedAt: s.State.Running.StartedAt}
	}
	if s.State.Terminated != nil {
		trimmed.State.Terminated = &v1.ContainerStateTerminated{ExitCode: s.State.Terminated.ExitCode, Reason: s.State.Terminated.Reason}
	}
	return trimmed
}

func trimVolume(volume *v1.PersistentVolume) {
	source := volume.Spec.PersistentVolumeSource // on servers, paths and secrets of other kinds nothing depends
	volume.Spec.PersistentVolumeSource = v1.PersistentVolumeSource{
		CSI: source.CSI, GCEPersistentDisk: source.GCEPersistentDisk, AWSElasticBlockStore: source.AWSElasticBlockStore,
		AzureDisk: source.AzureDisk, Cinder: source.Cinder,
	}
	volume.Spec.MountOptions = nil
	if csi := volume.Spec.CSI; csi != nil { // limits count volumes by driver and handle
		csi.VolumeAttributes, csi.ControllerPublishSecretRef, csi.NodeStageSecretRef, csi.NodePublishSecretRef = nil, nil, nil, nil
		csi.ControllerExpandSecretRef, csi.NodeExpandSecretRef = nil, nil
	}
}

func trimCSINode(node *storageapi.CSINode) {
	for i := range node.Spec.Drivers {
		node.Spec.Drivers[i].NodeID = "" // of clouds it is the machine's address
	}
}

func trimStorageClass(class *storageapi.StorageClass) {
	class.Parameters, class.MountOptions = nil, nil
}

// trimClaim drops the drivers' data and parameters: they say how a device is prepared, not which one it is.
func trimClaim(claim *resourceapi.ResourceClaim) {
	trimClaimSpec(&claim.Spec)
	if claim.Status.Allocation != nil {
		claim.Status.Allocation.Devices.Config = nil
	}
	for i := range claim.Status.Devices {
		claim.Status.Devices[i].Data, claim.Status.Devices[i].NetworkData = nil, nil
	}
}

func trimTemplate(template *resourceapi.ResourceClaimTemplate) {
	template.Spec.Annotations = nil
	trimClaimSpec(&template.Spec.Spec)
}

func trimClaimSpec(spec *resourceapi.ResourceClaimSpec) {
	for i := range spec.Devices.Config {
		if opaque := spec.Devices.Config[i].Opaque; opaque != nil {
			opaque.Parameters.Raw, opaque.Parameters.Object = []byte("{}"), nil
		}
	}
}
