// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// stored encodes an object as the API server does.
func stored(t *testing.T, object runtime.Object, version schema.GroupVersion) []byte {
	t.Helper()
	codec := scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), version)
	data, err := runtime.Encode(codec, object)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func put(key string, revision int64, value []byte) *clientv3.Event {
	return &clientv3.Event{Type: clientv3.EventTypePut, Kv: &mvccpb.KeyValue{Key: []byte(key), Value: value, ModRevision: revision}}
}

func TestReadingTheWatch(t *testing.T) {
	w := &etcdWatch{namespace: "ns"}
	pod := stored(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Spec: corev1.PodSpec{NodeName: "n"}}, corev1.SchemeGroupVersion)
	claim := stored(t, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}, resourceapi.SchemeGroupVersion)
	gone := &clientv3.Event{Type: clientv3.EventTypeDelete, Kv: &mvccpb.KeyValue{Key: []byte("/registry/resourceclaims/ns/c"), ModRevision: 8}}
	got, err := w.read(clientv3.WatchResponse{Events: []*clientv3.Event{
		put("/registry/pods/ns/p", 7, pod),
		put("/registry/resourceclaims/ns/c", 7, claim),
		put("/registry/pods/other/p", 7, pod),
		put("/registry/priorityclasses/p", 8, []byte("anything")), // between the two
		gone,
	}}, true)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, rev := range got {
		for _, change := range rev.changes {
			lines = append(lines, strings.Join([]string{string(rune('0' + rev.number)), describe(change)}, " "))
		}
	}
	want := []string{"7 pod p scheduler= node=n phase=", "7 claim c devices=[] reservedFor=[] writer=", "8 claim c deleted"}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

// What cannot be read must not be passed over: a violation could be in it.
func TestTheWatchFailsOnWhatItCannotRead(t *testing.T) {
	w := &etcdWatch{namespace: "ns"}
	other := stored(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}, corev1.SchemeGroupVersion)
	for name, event := range map[string]*clientv3.Event{
		"encrypted":    put("/registry/pods/ns/p", 1, []byte("k8s:enc:aescbc:v1:key")),
		"another kind": put("/registry/pods/ns/p", 1, other),
	} {
		if _, err := w.read(clientv3.WatchResponse{Events: []*clientv3.Event{event}}, true); err == nil || !strings.Contains(err.Error(), "/registry/pods/ns/p") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, err := w.read(clientv3.WatchResponse{}, false); err == nil {
		t.Error("a watch that has ended gives no error")
	}
	if _, err := w.read(clientv3.WatchResponse{CompactRevision: 5}, true); err == nil {
		t.Error("a watch that lags behind a compaction gives no error")
	}
}
