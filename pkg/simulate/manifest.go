// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	appsapi "k8s.io/api/apps/v1"
	batchapi "k8s.io/api/batch/v1"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	coredefaults "k8s.io/kubernetes/pkg/apis/core/v1"
	resourcedefaults "k8s.io/kubernetes/pkg/apis/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

const (
	// MaxManifestBytes bounds a file of manifests.
	MaxManifestBytes = 16 << 20
	// MaxPods bounds the pods of a file, replicas counted.
	MaxPods = 10_000
)

// Apply adds what a file of manifests has to the cluster: Pods, ResourceClaims, ResourceClaimTemplates, DeviceClasses, PriorityClasses and
// Nodes as they are, and pods for each replica of Deployments, ReplicaSets, StatefulSets and Jobs. It returns the pods. Objects without a
// namespace get the given one. The error names the document that is wrong.
func (c *Change) Apply(r io.Reader, namespace string) ([]*v1.Pod, error) {
	content, err := io.ReadAll(io.LimitReader(r, MaxManifestBytes+1))
	if err != nil {
		return nil, err
	}
	if len(content) > MaxManifestBytes {
		return nil, fmt.Errorf("it has more than %d bytes", MaxManifestBytes)
	}
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(content)))
	defer documents.Close()
	var pods []*v1.Pod
	buffer := make([]byte, len(content)+1)
	for i := 1; ; i++ {
		n, err := documents.Read(buffer)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		document, err := yaml.ToJSON(buffer[:n])
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		if string(document) == "null" {
			continue
		}
		object, err := decodeManifest(document)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		more, err := c.add(object, namespace)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		if pods = append(pods, more...); len(pods) > MaxPods {
			return nil, fmt.Errorf("document %d: more than %d pods", i, MaxPods)
		}
	}
	// Templates and claims may come after the pods that name them.
	for _, pod := range pods {
		if err := c.AddPod(pod); err != nil {
			return nil, err
		}
	}
	return pods, nil
}

// add takes in an object, and returns the pods that it stands for.
func (c *Change) add(object runtime.Object, namespace string) ([]*v1.Pod, error) {
	if o, ok := object.(metav1.Object); ok && o.GetNamespace() == "" {
		o.SetNamespace(namespace)
	}
	switch object := object.(type) {
	case *v1.Pod:
		coredefaults.SetObjectDefaults_Pod(object)
		return []*v1.Pod{object}, nil
	case *v1.List:
		return c.addList(object, namespace)
	case *resourceapi.ResourceClaim:
		resourcedefaults.SetObjectDefaults_ResourceClaim(object)
		return nil, c.AddClaim(object)
	case *resourceapi.ResourceClaimTemplate:
		resourcedefaults.SetObjectDefaults_ResourceClaimTemplate(object)
		identify(object, "ResourceClaimTemplate")
		c.ResourceClaimTemplates = replace(c.ResourceClaimTemplates, object)
		return nil, nil
	case *resourceapi.DeviceClass:
		object.Namespace = ""
		identify(object, "DeviceClass")
		c.DeviceClasses = replace(c.DeviceClasses, object)
		return nil, nil
	case *schedulingapi.PriorityClass:
		object.Namespace = ""
		identify(object, "PriorityClass")
		c.PriorityClasses = replace(c.PriorityClasses, object)
		return nil, nil
	case *v1.Node:
		object.Namespace = ""
		identify(object, "Node")
		c.Nodes = replace(c.Nodes, object)
		return nil, nil
	case *appsapi.Deployment:
		return replicas(object, "Deployment", object.Spec.Replicas, &object.Spec.Template)
	case *appsapi.ReplicaSet:
		return replicas(object, "ReplicaSet", object.Spec.Replicas, &object.Spec.Template)
	case *appsapi.StatefulSet:
		return replicas(object, "StatefulSet", object.Spec.Replicas, &object.Spec.Template)
	case *batchapi.Job:
		return replicas(object, "Job", atOnce(&object.Spec), &object.Spec.Template)
	case *v1.Namespace, *v1.Service, *v1.ConfigMap, *v1.Secret, *v1.ServiceAccount:
		return nil, nil // no pod has another place for them
	}
	kind := object.GetObjectKind().GroupVersionKind()
	return nil, cannotBePlaced(kind.GroupVersion().String(), kind.Kind)
}

// decodeManifest decodes an object of a kind that a client of Kubernetes knows.
func decodeManifest(document []byte) (runtime.Object, error) {
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
	var of metav1.TypeMeta
	if runtime.IsNotRegisteredError(err) && json.Unmarshal(document, &of) == nil {
		return nil, cannotBePlaced(of.APIVersion, of.Kind)
	}
	return object, err
}

func cannotBePlaced(apiVersion, kind string) error {
	return fmt.Errorf("%s of %s: cannot be placed: want pods, claims, templates, classes, nodes, Deployments, ReplicaSets, "+
		"StatefulSets or Jobs",
		kind, apiVersion)
}

// atOnce is how many pods a Job has at the same time: no more than are to complete, and none while it is suspended.
func atOnce(job *batchapi.JobSpec) *int32 {
	n := ptr.Deref(job.Parallelism, 1)
	if job.Completions != nil {
		n = min(n, *job.Completions)
	}
	if ptr.Deref(job.Suspend, false) {
		n = 0
	}
	return &n
}

func (c *Change) addList(list *v1.List, namespace string) (pods []*v1.Pod, err error) {
	for i := range list.Items {
		object, err := decodeManifest(list.Items[i].Raw)
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		more, err := c.add(object, namespace)
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		pods = append(pods, more...)
	}
	return pods, nil
}

// replicas are the pods that a controller would make.
func replicas(owner metav1.Object, kind string, n *int32, template *v1.PodTemplateSpec) ([]*v1.Pod, error) {
	number := ptr.Deref(n, 1)
	if number < 0 || number > MaxPods {
		return nil, fmt.Errorf("%s %s: %d replicas: want 0 to %d", kind, snapshot.Reference(owner), number, MaxPods)
	}
	pods := make([]*v1.Pod, 0, number)
	for i := range number {
		pod := &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: owner.GetNamespace(), Name: fmt.Sprintf("%s-%d", owner.GetName(), i), Labels: template.Labels,
				OwnerReferences: []metav1.OwnerReference{{Kind: kind, Name: owner.GetName(), Controller: ptr.To(true)}},
			},
			Spec: *template.Spec.DeepCopy(),
		}
		coredefaults.SetObjectDefaults_Pod(pod)
		pods = append(pods, pod)
	}
	return pods, nil
}

// replace puts an object in the place of that of its name.
func replace[T metav1.Object](list []T, object T) []T {
	for i := range list {
		if list[i].GetNamespace() == object.GetNamespace() && list[i].GetName() == object.GetName() {
			list[i] = object
			return list
		}
	}
	return append(list, object)
}
