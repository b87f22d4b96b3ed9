// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// segmentLabel stands on nodes: the part of the storage that they can reach.
const segmentLabel = "test.example/segment"

// Sizes of storage: what every volume wants, and what a segment has when it has any.
const (
	volumeSize  = "10Gi"
	segmentSize = "100Gi"
)

// storage is a CSI driver of the world, which tells how much capacity its segments have. Volumes of its class are
// provisioned when a pod has a node.
type storage struct {
	*world
	driver, class string
}

// addStorage makes a driver and its class, after each option has had its say.
func (w *world) addStorage(options ...func(*storagev1.CSIDriver, *storagev1.StorageClass)) *storage {
	w.t.Helper()
	s := &storage{world: w, driver: w.name + ".csi.example", class: w.name}
	driver := &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: s.driver},
		Spec:       storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true), AttachRequired: ptr.To(false)},
	}
	class := &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: s.class},
		Provisioner:       s.driver,
		ReclaimPolicy:     ptr.To(v1.PersistentVolumeReclaimRetain),
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	for _, change := range options {
		change(driver, class)
	}
	_, err := w.client.StorageV1().CSIDrivers().Create(w.ctx, driver, metav1.CreateOptions{})
	w.must(err, "creating CSI driver %s", s.driver)
	w.t.Cleanup(func() { w.cleanUp(w.client.StorageV1().CSIDrivers().Delete, s.driver) })
	_, err = w.client.StorageV1().StorageClasses().Create(w.ctx, class, metav1.CreateOptions{})
	w.must(err, "creating storage class %s", s.class)
	w.t.Cleanup(func() { w.cleanUp(w.client.StorageV1().StorageClasses().Delete, s.class) })
	return s
}

// reaches puts the node into a segment.
func (s *storage) reaches(nodeSuffix, segment string) {
	s.t.Helper()
	node, label := s.nodeName(nodeSuffix), s.segment(segment)
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, segmentLabel, label)
	_, err := s.client.CoreV1().Nodes().Patch(s.ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err, "labelling node %s", node)
	_, err = s.client.StorageV1().CSINodes().Create(s.ctx, &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: s.driver, NodeID: node, TopologyKeys: []string{segmentLabel}}}},
	}, metav1.CreateOptions{})
	s.must(err, "creating CSINode %s", node)
	s.t.Cleanup(func() { s.cleanUp(s.client.StorageV1().CSINodes().Delete, node) })
}

// segment is the value of the label of a segment.
func (s *storage) segment(name string) string { return s.name + "-" + name }

// setCapacity publishes what a segment has left.
func (s *storage) setCapacity(segment, size string) error {
	return s.publishCapacity(segment, map[string]string{segmentLabel: s.segment(segment)}, size)
}

// publishCapacity publishes what is left for nodes with the given labels.
func (s *storage) publishCapacity(name string, nodes map[string]string, size string) error {
	capacities := s.client.StorageV1().CSIStorageCapacities(s.name)
	wanted := &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{Name: name},
		StorageClassName: s.class,
		NodeTopology:     &metav1.LabelSelector{MatchLabels: nodes},
		Capacity:         ptr.To(resource.MustParse(size)),
	}
	_, err := capacities.Create(s.ctx, wanted, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	current, err := capacities.Get(s.ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	current.Capacity = wanted.Capacity
	_, err = capacities.Update(s.ctx, current, metav1.UpdateOptions{})
	return err
}

// fill gives segments room for volumes.
func (s *storage) fill(segments ...string) {
	s.t.Helper()
	for _, segment := range segments {
		s.must(s.setCapacity(segment, segmentSize), "publishing the capacity of segment %s", segment)
	}
}

// withVolume makes the pod use a volume claim.
func withVolume(claim string) podOption {
	return func(p *v1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: claim, VolumeSource: v1.VolumeSource{
			PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}})
	}
}

// volumeClaim wants a volume of the class. It is not created.
func (s *storage) volumeClaim(name string, mode v1.PersistentVolumeAccessMode) *v1.PersistentVolumeClaim {
	return &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: s.name},
		Spec: v1.PersistentVolumeClaimSpec{
			StorageClassName: &s.class,
			AccessModes:      []v1.PersistentVolumeAccessMode{mode},
			Resources:        v1.VolumeResourceRequirements{Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse(volumeSize)}},
		},
	}
}

func (s *storage) createVolumeClaim(claim *v1.PersistentVolumeClaim) *v1.PersistentVolumeClaim {
	s.t.Helper()
	created, err := s.client.CoreV1().PersistentVolumeClaims(s.name).Create(s.ctx, claim, metav1.CreateOptions{})
	s.must(err, "creating volume claim %s", claim.Name)
	return created
}

// addVolumeClaim makes a volume claim that waits for its first pod.
func (s *storage) addVolumeClaim(name string) *v1.PersistentVolumeClaim {
	s.t.Helper()
	return s.createVolumeClaim(s.volumeClaim(name, v1.ReadWriteOnce))
}

// addBoundVolume makes a volume in a segment, and a claim that has it.
func (s *storage) addBoundVolume(name, segment string, mode v1.PersistentVolumeAccessMode) {
	s.t.Helper()
	claim := s.volumeClaim(name, mode)
	claim.Spec.VolumeName = s.name + "-" + name
	claim = s.createVolumeClaim(claim)
	s.must(s.createVolume(s.volumeFor(claim, claim.Spec.VolumeName, s.segment(segment))), "creating volume %s", claim.Spec.VolumeName)
	s.awaitVolume(name)
}

// volumeFor is a volume for a claim, in the segment with the given label. It is not created.
func (s *storage) volumeFor(claim *v1.PersistentVolumeClaim, name, label string) *v1.PersistentVolume {
	return &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{volume.AnnDynamicallyProvisioned: s.driver}},
		Spec: v1.PersistentVolumeSpec{
			StorageClassName:              s.class,
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      v1.ResourceList{v1.ResourceStorage: claim.Spec.Resources.Requests[v1.ResourceStorage]},
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
			ClaimRef:                      &v1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			PersistentVolumeSource:        v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{Driver: s.driver, VolumeHandle: name}},
			NodeAffinity:                  &v1.VolumeNodeAffinity{Required: labelled(segmentLabel, label)},
		},
	}
}

// createVolume makes a volume that goes with the test. One that is there already is no error.
func (s *storage) createVolume(pv *v1.PersistentVolume) error {
	if _, err := s.client.CoreV1().PersistentVolumes().Create(s.ctx, pv, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	s.t.Cleanup(func() {
		s.cleanUp(s.client.CoreV1().PersistentVolumeClaims(s.name).Delete, pv.Spec.ClaimRef.Name)
		s.cleanUp(s.client.CoreV1().PersistentVolumes().Delete, pv.Name)
	})
	return nil
}

func (s *storage) volumeClaims(selector fields.Selector) cache.ListerWatcher {
	return cache.NewListWatchFromClient(s.client.CoreV1().RESTClient(), "persistentvolumeclaims", s.name, selector)
}

// awaitVolume waits until the claim has a volume, and returns the label of that volume's segment.
func (s *storage) awaitVolume(claim string) string {
	s.t.Helper()
	bound := await(s.world, "volume claim "+claim+" to be bound", s.volumeClaims(named(claim)), func(c *v1.PersistentVolumeClaim) bool {
		return c.Status.Phase == v1.ClaimBound
	})
	pv, err := s.client.CoreV1().PersistentVolumes().Get(s.ctx, bound.Spec.VolumeName, metav1.GetOptions{})
	s.must(err, "getting volume %s", bound.Spec.VolumeName)
	return pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values[0]
}

// checkUntouched fails if anybody has written the volume claim since it was made.
func (s *storage) checkUntouched(claim *v1.PersistentVolumeClaim, when string) {
	s.t.Helper()
	current, err := s.client.CoreV1().PersistentVolumeClaims(s.name).Get(s.ctx, claim.Name, metav1.GetOptions{})
	s.must(err, "getting volume claim %s", claim.Name)
	if current.ResourceVersion != claim.ResourceVersion {
		s.t.Errorf("%s the volume claim %s has been written: annotations %v, volume %q", when, claim.Name, current.Annotations, current.Spec.VolumeName)
	}
}

// provision plays the external provisioner of the driver until the test ends. It makes a volume in the segment of the node
// that was selected for a claim. Where refuse returns true it fails as a provisioner does that has no room: it takes
// the selected node away, so that another one is chosen.
func (s *storage) provision(refuse func(node string) bool) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	var running sync.WaitGroup
	s.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	running.Go(func() {
		_, err := listAndWatch(ctx, s.volumeClaims(fields.Everything()), func(event watch.EventType, object runtime.Object) bool {
			claim, ok := object.(*v1.PersistentVolumeClaim)
			if !ok || event == watch.Deleted || claim.Spec.VolumeName != "" || claim.Annotations[volume.AnnStorageProvisioner] != s.driver {
				return false
			}
			if node, ok := claim.Annotations[volume.AnnSelectedNode]; ok {
				if err := s.answer(claim, node, refuse(node)); err != nil && ctx.Err() == nil {
					s.t.Errorf("provisioning a volume for %s on node %s: %v", claim.Name, node, err)
				}
			}
			return false
		})
		if ctx.Err() == nil {
			s.t.Errorf("watching volume claims: %v", err)
		}
	})
}

func (s *storage) answer(claim *v1.PersistentVolumeClaim, nodeName string, refused bool) error {
	if refused {
		claim = claim.DeepCopy()
		delete(claim.Annotations, volume.AnnSelectedNode)
		_, err := s.client.CoreV1().PersistentVolumeClaims(s.name).Update(s.ctx, claim, metav1.UpdateOptions{})
		if apierrors.IsConflict(err) {
			return nil // the change that was first is an event as well
		}
		return err
	}
	node, err := s.client.CoreV1().Nodes().Get(s.ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	return s.createVolume(s.volumeFor(claim, "pvc-"+string(claim.UID), node.Labels[segmentLabel]))
}
