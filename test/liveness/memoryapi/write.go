// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// write is a request that changes something.
type write struct {
	request
	server      *Server
	client      string
	verb        string
	body        []byte
	manager     string
	contentType string
}

// carryOut makes the change, or says why it is refused.
func (w *write) carryOut() (runtime.Object, error) {
	s := w.server
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch {
	case w.verb == "create" && w.subresource == "binding":
		return w.bind()
	case w.verb == "create" && w.subresource == "":
		return w.create()
	case w.verb == "delete":
		return w.delete()
	case w.verb == "update", w.verb == "patch":
		return w.update()
	}
	return nil, w.unknown(w.verb + " " + w.what())
}

// unknown notes that a client wants what is not here. A test that goes on without would test less than it seems to.
func (w *write) unknown(what string) error {
	err := fmt.Errorf("the API in memory does not know %s, which %s sent", what, w.client)
	w.server.problems = append(w.server.problems, err)
	return apierrors.NewInternalError(err)
}

func (w *write) create() (runtime.Object, error) {
	object := w.newObject()
	if err := decode(w.body, object); err != nil {
		return nil, err
	}
	m := object.(metav1.Object)
	if m.GetNamespace() == "" {
		m.SetNamespace(w.namespace)
	}
	s := w.server
	s.objects++
	if m.GetName() == "" && m.GetGenerateName() != "" {
		m.SetName(m.GetGenerateName() + strconv.Itoa(s.objects))
	}
	if s.kind(w.resource).objects[nameOf(object)] != nil {
		return nil, apierrors.NewAlreadyExists(w.groupResource(), m.GetName())
	}
	m.SetUID(types.UID(fmt.Sprintf("%s-%d", m.GetName(), s.objects)))
	m.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
	m.SetGeneration(1)
	m.SetDeletionTimestamp(nil)
	if status := statusOf(object); status.IsValid() {
		status.SetZero()
	}
	if pod, ok := object.(*v1.Pod); ok {
		pod.Status.Phase = v1.PodPending
	}
	object, err := managed(nil, object, w.manager, "")
	if err != nil {
		return nil, err
	}
	s.store(w, watch.Added, object)
	return object, nil
}

// bind is pods/binding: it gives a node to a pod that has none.
func (w *write) bind() (runtime.Object, error) {
	binding := &v1.Binding{}
	if err := decode(w.body, binding); err != nil {
		return nil, err
	}
	stored, err := w.stored()
	if err != nil {
		return nil, err
	}
	pod := stored.DeepCopyObject().(*v1.Pod)
	var reason string
	switch {
	case binding.UID != "" && binding.UID != pod.UID:
		reason = "the UID in the precondition is another one"
	case pod.DeletionTimestamp != nil:
		reason = "pod " + pod.Name + " is being deleted, cannot be assigned to a host"
	case pod.Spec.NodeName != "":
		reason = fmt.Sprintf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName)
	}
	if reason != "" {
		return nil, apierrors.NewConflict(v1.Resource("pods/binding"), pod.Name, errors.New(reason))
	}
	pod.Spec.NodeName = binding.Target.Name
	pod.Status.NominatedNodeName = "" // ClearingNominatedNodeNameAfterBinding
	pod.Status.Conditions = slices.DeleteFunc(pod.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == v1.PodScheduled })
	pod.Status.Conditions = append(pod.Status.Conditions, v1.PodCondition{
		Type: v1.PodScheduled, Status: v1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Truncate(time.Second)),
	})
	w.server.store(w, watch.Modified, pod)
	return &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess}, nil
}

// update is for updates and patches, of an object or its status.
func (w *write) update() (runtime.Object, error) {
	stored, err := w.stored()
	if err != nil {
		return nil, err
	}
	sent := w.newObject()
	if w.verb == "patch" {
		sent, err = w.patched(stored)
	} else {
		err = decode(w.body, sent)
	}
	if err != nil {
		return nil, err
	}
	was, is := stored.(metav1.Object), sent.(metav1.Object)
	if is.GetUID() != "" && is.GetUID() != was.GetUID() ||
		is.GetResourceVersion() != "" && is.GetResourceVersion() != was.GetResourceVersion() {
		return nil, apierrors.NewConflict(w.groupResource(), w.name,
			errors.New("the object has been modified; please apply your changes to the latest version and try again"))
	}
	next := stored.DeepCopyObject()
	switch w.subresource {
	case "status":
		if status := statusOf(next); status.IsValid() {
			status.Set(statusOf(sent))
		}
		if w.verb == "patch" { // a status may bring labels and annotations along; nobody here sends them
			next.(metav1.Object).SetManagedFields(is.GetManagedFields())
		}
		dropDeallocated(stored, next)
		if err := validStatus(stored, next); err != nil {
			return nil, err
		}
	case "":
		next = sent.DeepCopyObject()
		if status := statusOf(next); status.IsValid() {
			status.Set(statusOf(stored.DeepCopyObject()))
		}
		n := next.(metav1.Object)
		n.SetUID(was.GetUID())
		n.SetCreationTimestamp(was.GetCreationTimestamp())
		n.SetDeletionTimestamp(was.GetDeletionTimestamp())
		n.SetDeletionGracePeriodSeconds(was.GetDeletionGracePeriodSeconds())
		n.SetGeneration(was.GetGeneration())
		if !apiequality.Semantic.DeepEqual(specOf(stored), specOf(next)) {
			n.SetGeneration(was.GetGeneration() + 1)
		}
	default:
		return nil, w.unknown(w.verb + " " + w.what())
	}
	next.(metav1.Object).SetResourceVersion(was.GetResourceVersion())
	next.(metav1.Object).SetManagedFields(was.GetManagedFields())
	next.GetObjectKind().SetGroupVersionKind(w.kind)
	if apiequality.Semantic.DeepEqual(stored, next) {
		return stored, nil // has no version
	}
	if next, err = managed(stored, next, w.manager, w.subresource); err != nil {
		return nil, err
	}
	if n := next.(metav1.Object); n.GetDeletionTimestamp() != nil && len(n.GetFinalizers()) == 0 && n.GetDeletionGracePeriodSeconds() == nil {
		w.server.store(w, watch.Deleted, next)
		return next, nil
	}
	w.server.store(w, watch.Modified, next)
	return next, nil
}

func (w *write) patched(stored runtime.Object) (runtime.Object, error) {
	original, err := json.Marshal(stored)
	if err != nil {
		return nil, err
	}
	var result []byte
	switch types.PatchType(w.contentType) {
	// An apply adds or changes what it has. Nobody here applies less than before, which would take away.
	case types.StrategicMergePatchType, types.ApplyPatchType:
		result, err = strategicpatch.StrategicMergePatch(original, w.body, w.newObject())
	case types.MergePatchType:
		result, err = mergePatch(original, w.body)
	default:
		err = w.unknown("patches of type " + w.contentType)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	object := w.newObject()
	return object, decode(result, object)
}

// mergePatch is RFC 7386.
func mergePatch(original, patch []byte) ([]byte, error) {
	var into, from map[string]any
	if err := errors.Join(json.Unmarshal(original, &into), json.Unmarshal(patch, &from)); err != nil {
		return nil, err
	}
	return json.Marshal(merge(into, from))
}

func merge(into, from map[string]any) map[string]any {
	if into == nil {
		into = map[string]any{}
	}
	for key, value := range from {
		switch value := value.(type) {
		case nil:
			delete(into, key)
		case map[string]any:
			old, _ := into[key].(map[string]any)
			into[key] = merge(old, value)
		default:
			into[key] = value
		}
	}
	return into
}

// delete removes an object, or marks it as being deleted if it has finalizers, or is a pod that a node still has.
func (w *write) delete() (runtime.Object, error) {
	options := &metav1.DeleteOptions{}
	if len(w.body) > 0 {
		if err := json.Unmarshal(w.body, options); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	stored, err := w.stored()
	if err != nil {
		return nil, err
	}
	m := stored.(metav1.Object)
	if p := options.Preconditions; p != nil &&
		(p.UID != nil && *p.UID != m.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != m.GetResourceVersion()) {
		return nil, apierrors.NewConflict(w.groupResource(), w.name, errors.New("the precondition in the deletion does not hold"))
	}
	var grace *int64
	if pod, ok := stored.(*v1.Pod); ok && pod.Spec.NodeName != "" && pod.Status.Phase != v1.PodSucceeded && pod.Status.Phase != v1.PodFailed {
		grace = options.GracePeriodSeconds
		if grace == nil {
			grace = pod.Spec.TerminationGracePeriodSeconds
		}
		if grace == nil {
			grace = ptr.To[int64](v1.DefaultTerminationGracePeriodSeconds)
		}
		if *grace == 0 {
			grace = nil
		}
	}
	if grace == nil && len(m.GetFinalizers()) == 0 {
		w.server.store(w, watch.Deleted, stored.DeepCopyObject())
		return stored, nil
	}
	until := metav1.NewTime(time.Now().Add(time.Duration(ptr.Deref(grace, 0)) * time.Second).Truncate(time.Second))
	if old := m.GetDeletionTimestamp(); old != nil && (grace == nil || !until.Before(old)) {
		return stored, nil // it is on its way already
	}
	next := stored.DeepCopyObject()
	next.(metav1.Object).SetDeletionTimestamp(&until)
	next.(metav1.Object).SetDeletionGracePeriodSeconds(grace)
	w.server.store(w, watch.Modified, next)
	return next, nil
}

func (w *write) stored() (runtime.Object, error) {
	object := w.server.kind(w.resource).objects[types.NamespacedName{Namespace: w.namespace, Name: w.name}]
	if object == nil {
		return nil, apierrors.NewNotFound(w.groupResource(), w.name)
	}
	return object, nil
}

// store gives an object a new version and lets the watches tell of it.
func (s *Server) store(w *write, change watch.EventType, object runtime.Object) {
	s.version++
	m := object.(metav1.Object)
	m.SetResourceVersion(strconv.FormatInt(s.version, 10))
	object.GetObjectKind().SetGroupVersionKind(w.kind)
	k := s.kind(w.resource)
	before := k.objects[nameOf(object)]
	if change == watch.Deleted {
		delete(k.objects, nameOf(object))
	} else {
		k.objects[nameOf(object)] = object
	}
	k.log = append(k.log, event{version: s.version, kind: change, object: object, line: encodeEvent(change, object)})
	s.show(k)
	if s.accepted != nil {
		s.accepted(Write{
			Client: w.client, Verb: w.verb, What: w.what(), Version: s.version,
			Before: before, Object: object, Deleted: change == watch.Deleted,
		})
	}
	if change == watch.Deleted && s.OnDelete != nil {
		s.OnDelete(object)
	}
}

func decode(body []byte, into runtime.Object) error {
	if err := json.Unmarshal(body, into); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return nil
}

// statusOf is the status of an object, invalid if its kind has none.
func statusOf(object runtime.Object) reflect.Value { return field(object, "Status") }

// specOf is the spec of an object, nil if its kind has none.
func specOf(object runtime.Object) any {
	if spec := field(object, "Spec"); spec.IsValid() {
		return spec.Interface()
	}
	return nil
}

func field(object runtime.Object, name string) reflect.Value {
	return reflect.ValueOf(object).Elem().FieldByName(name)
}
