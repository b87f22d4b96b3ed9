// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"stowage.dev/stowage/test/chaos/audit"
)

// Pods and claims are between these keys, so that one watch brings the changes of
// both in the one order that there is.
const (
	podsKey     = "/registry/pods/"
	claimsKey   = "/registry/resourceclaims/"
	afterClaims = "/registry/resourceclaims0" // the first key behind
)

// etcdWatch is a watch on etcd itself. The API server may crash, lag or lie; this
// is what has been stored.
type etcdWatch struct {
	namespace string
	changes   clientv3.WatchChan
}

func newEtcdClient(endpoint string) (*clientv3.Client, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 10 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("connecting to etcd at %s: %w", endpoint, err)
	}
	return client, nil
}

// watchEtcd begins at the present revision. There must be nothing in the
// namespace yet.
func watchEtcd(ctx context.Context, client *clientv3.Client, namespace string) (*etcdWatch, error) {
	now, err := client.Get(ctx, podsKey, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return nil, fmt.Errorf("asking etcd for its revision: %w", err)
	}
	return &etcdWatch{
		namespace: namespace,
		changes:   client.Watch(ctx, podsKey, clientv3.WithRange(afterClaims), clientv3.WithRev(now.Header.Revision+1)),
	}, nil
}

// revision is everything that changed at one revision.
type revision struct {
	number  int64
	changes []audit.Change
}

// read returns what the watch brought next, by revision. It fails when the watch
// cannot go on, as nobody knows what has happened since.
func (w *etcdWatch) read(answer clientv3.WatchResponse, ok bool) ([]revision, error) {
	if !ok {
		return nil, fmt.Errorf("the watch on etcd has ended")
	}
	if err := answer.Err(); err != nil {
		return nil, fmt.Errorf("the watch on etcd has ended: %w", err)
	}
	var all []revision
	for _, event := range answer.Events {
		change, ours, err := w.decode(event)
		if err != nil {
			return nil, err
		}
		if !ours {
			continue
		}
		if n := len(all); n == 0 || all[n-1].number != event.Kv.ModRevision {
			all = append(all, revision{number: event.Kv.ModRevision})
		}
		last := &all[len(all)-1]
		last.changes = append(last.changes, change)
	}
	return all, nil
}

// decode reads what the API server has stored. Keys are
// /registry/<resource>/<namespace>/<name>.
func (w *etcdWatch) decode(event *clientv3.Event) (change audit.Change, ours bool, err error) {
	key := string(event.Kv.Key)
	resource, path := podsKey, strings.TrimPrefix(key, podsKey)
	if path == key {
		resource, path = claimsKey, strings.TrimPrefix(key, claimsKey)
	}
	namespace, name, found := strings.Cut(path, "/")
	if !found || namespace != w.namespace {
		return change, false, nil
	}
	if event.Type == clientv3.EventTypeDelete {
		change.Deleted = true
		if resource == podsKey {
			change.Pod = &corev1.Pod{}
			change.Pod.Namespace, change.Pod.Name = namespace, name
		} else {
			change.Claim = &resourceapi.ResourceClaim{}
			change.Claim.Namespace, change.Claim.Name = namespace, name
		}
		return change, true, nil
	}
	object, kind, err := scheme.Codecs.UniversalDeserializer().Decode(event.Kv.Value, nil, nil)
	if err != nil {
		return change, false, fmt.Errorf("reading %s as etcd has it: %w", key, err)
	}
	switch object := object.(type) {
	case *corev1.Pod:
		change.Pod = object
	case *resourceapi.ResourceClaim:
		change.Claim = object
	default:
		return change, false, fmt.Errorf("etcd has a %s at %s: this program reads pods v1 and claims resource.k8s.io/v1", kind, key)
	}
	return change, true, nil
}
