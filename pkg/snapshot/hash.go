// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Hash returns a copy whose names of nodes, namespaces, pods, claims, templates, groups and volumes are replaced, wherever they stand,
// and so are the labels of pods and namespaces and what selects them. Equal names stay equal. The key is random and forgotten.
//
// Labels and taints of nodes, device names and attributes, classes and drivers stay: decisions are about them. Orders by name change, so
// that a decision between equal nodes may be another one than in the original; replays of the copy are alike.
func (s *Snapshot) Hash() (*Snapshot, error) {
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return s.hashWith(key)
}

func (s *Snapshot) hashWith(key []byte) (*Snapshot, error) {
	var written bytes.Buffer
	if err := s.Write(&written); err != nil {
		return nil, err
	}
	var tree map[string]any
	decoder := json.NewDecoder(&written)
	decoder.UseNumber()
	if err := decoder.Decode(&tree); err != nil {
		return nil, err
	}
	h := &hasher{key: key, nodes: map[string]bool{}, ephemeral: map[string]string{}}
	for _, pod := range s.Pods {
		for i := range pod.Spec.Volumes {
			if volume := &pod.Spec.Volumes[i]; volume.Ephemeral != nil {
				h.ephemeral[pod.Name+"-"+volume.Name] = h.name("pod", pod.Name) + "-" + h.name(podVolume, volume.Name)
			}
		}
	}
	for _, node := range s.Nodes {
		h.nodes[node.Name] = true
		if host := node.Labels[v1.LabelHostname]; host != "" {
			h.nodes[host] = true
		}
	}
	for field, list := range tree {
		items, ok := list.([]any)
		if !ok || field == "missing" {
			continue
		}
		for _, item := range items {
			h.object(field, item.(map[string]any))
		}
	}
	tree["hashedNames"] = true
	delete(tree, "installation") // names of accounts stand in expressions and arguments
	hideReasons(tree["missing"])
	hashed, err := json.Marshal(tree)
	if err != nil {
		return nil, err
	}
	return decode(&text{from: bytes.NewReader(hashed)})
}

// hideReasons leaves of why something could not be read what is not an answer of a server, which has names of nodes, or addresses.
func hideReasons(missing any) {
	list, _ := missing.([]any)
	for _, item := range list {
		if entry, ok := item.(map[string]any); ok && entry["reason"] != forbidden && entry["reason"] != notServed {
			entry["reason"] = "no answer"
		}
	}
}

type hasher struct {
	key   []byte
	nodes map[string]bool
	// ephemeral are the names of the claims of pods' ephemeral volumes, which pod and volume give them: these are found by them alone.
	ephemeral map[string]string
}

// podVolume is the sort of the names of a pod's volumes.
const podVolume = "podvolume"

// name is short, and equal for equal names of one sort.
func (h *hasher) name(sort, name string) string {
	if name == "" {
		return ""
	}
	if of := h.ephemeral[name]; of != "" && sort == "pvc" {
		return of
	}
	mac := hmac.New(sha256.New, h.key)
	mac.Write([]byte(sort + "\x00" + name))
	return sort + "-" + hex.EncodeToString(mac.Sum(nil)[:5])
}

// named are the kinds whose names users give.
var named = map[string]string{
	"nodes": "node", "pods": "pod", "namespaces": "ns", "persistentVolumeClaims": "pvc", "persistentVolumes": "pv", "csiNodes": "node",
	"podDisruptionBudgets": "pdb", "podGroups": "group", "resourceSlices": "slice", "resourceClaims": "claim",
	"resourceClaimTemplates": "template",
	"deviceTaintRules":       "rule",
}

// references are fields that name objects, wherever they stand. A pool has the name of a node, or one that its driver gave.
var references = map[string]string{
	"namespace": "ns", "nodeName": "node", "nominatedNodeName": "node", "resourceClaimName": "claim", "resourceClaimTemplateName": "template",
	"claimName": "pvc", "volumeName": "pv", "podGroupName": "group", "hostname": "host", "hostnameOverride": "host", "subdomain": "host",
	"serviceAccountName": "account", "serviceAccount": "account", "volumeHandle": "volume", "generateName": "prefix",
	"workloadName": "workload", "parentCompositePodGroupName": "group", "pdName": "volume", "volumeID": "volume",
	"diskName": "volume", "diskURI": "volume",
	"containerName": "container", "templateName": "part", nodeAnnotation: "node", v1.LabelHostname: "node",
}

// nodeAnnotation names a node, which may be gone.
const nodeAnnotation = "volume.kubernetes.io/selected-node"

func (h *hasher) object(field string, object map[string]any) {
	meta, _ := object["metadata"].(map[string]any)
	if sort := named[field]; sort != "" && meta != nil {
		name, _ := meta["name"].(string)
		meta["name"] = h.name(sort, name)
	}
	labels := field == "pods" || field == "persistentVolumes" || field == "namespaces" || field == "podGroups" ||
		field == "podDisruptionBudgets" ||
		strings.HasPrefix(field, "resourceClaim") || strings.HasPrefix(field, "persistentVolumeClaim")
	h.walk(object, labels)
}

// walk replaces what is below a value. With labels, all labels and what selects them are replaced, else those of nodes' names alone.
func (h *hasher) walk(value any, labels bool) {
	switch value := value.(type) {
	case []any:
		for _, item := range value {
			h.walk(item, labels)
		}
	case map[string]any:
		for key, item := range value {
			switch text, isText := item.(string); {
			case key == "message", key == "environment", key == "description" && isText:
				delete(value, key)
			case key == "pool":
				value[key] = h.pool(item)
			case isText && references[key] != "": // before nodes: a namespace may have the name of one
				value[key] = h.name(references[key], text)
			case isText && h.nodes[text]:
				value[key] = h.name("node", text)
			case key == "disruptedPods":
				value[key] = h.keys("pod", item)
			case key == "containers" || key == "initContainers" || key == "containerStatuses" || key == "initContainerStatuses":
				h.items("container", item)
				h.walk(item, labels)
			case key == "volumes":
				h.items(podVolume, item)
				h.walk(item, labels)
			case key == "labels" || key == "matchLabels":
				h.labels(item, labels)
			case key == "nodeSelector" && hasLabels(item):
				h.labels(item, false)
			case key == "nodeAffinity" || key == "nodeSelector":
				h.values(item, false, "")
			case ofDrivers[key]: // the keys below are names that drivers give, whatever they mean elsewhere
				h.each(item, labels)
			case key == "matchExpressions" || key == "matchLabelExpressions":
				h.values(item, labels, "")
			case key == "namespaces":
				h.namespaces(item)
			case key == "ownerReferences", key == "reservedFor", key == "claimRef", key == "consumerRef", key == "dataSource",
				key == "dataSourceRef", key == "secretRef":
				h.refs(key, item)
			default:
				h.walk(item, labels)
			}
		}
	}
}

// ofDrivers are fields of devices whose keys are no fields.
var ofDrivers = map[string]bool{"attributes": true, "capacity": true, "counters": true, "consumedCapacity": true}

// each replaces what is below the values of a map, and leaves its keys.
func (h *hasher) each(value any, labels bool) {
	object, _ := value.(map[string]any)
	for _, item := range object {
		h.walk(item, labels)
	}
}

// hasLabels tells a pod's node selector, which is a map of labels, from one that has terms.
func hasLabels(selector any) bool {
	object, _ := selector.(map[string]any)
	_, terms := object["nodeSelectorTerms"].([]any)
	return !terms
}

// namespaces are those that an affinity names.
func (h *hasher) namespaces(value any) {
	list, _ := value.([]any)
	for i, item := range list {
		if name, ok := item.(string); ok {
			list[i] = h.name("ns", name)
		}
	}
}

// refs are references of a field by kind, or resource, and name.
func (h *hasher) refs(field string, value any) {
	list, ok := value.([]any)
	if !ok {
		list = []any{value}
	}
	for _, item := range list {
		ref, ok := item.(map[string]any)
		if !ok {
			continue
		}
		sort := map[string]string{
			"Pod": "pod", "pods": "pod", "PodGroup": "group", "podgroups": "group",
			"PersistentVolumeClaim": "pvc", "Node": "node",
		}
		kind, _ := ref["kind"].(string)
		if kind == "" {
			kind, _ = ref["resource"].(string)
		}
		if field == "claimRef" { // users who bind a volume leave the kind out
			kind = "PersistentVolumeClaim"
		}
		name, _ := ref["name"].(string)
		if s := sort[kind]; s != "" {
			ref["name"] = h.name(s, name)
		} else {
			ref["name"] = h.name("owner", name)
		}
		if ns, ok := ref["namespace"].(string); ok {
			ref["namespace"] = h.name("ns", ns)
		}
	}
}

func (h *hasher) labels(value any, all bool) {
	labels, _ := value.(map[string]any)
	for key, item := range labels {
		text, _ := item.(string)
		switch {
		case h.nodes[text], key == v1.LabelHostname:
			labels[key] = h.name("node", text)
		case all && key == v1.LabelMetadataName:
			labels[key] = h.name("ns", text)
		case all && text != "" && !isTopology(key):
			labels[key] = h.name("label", text)
		}
	}
}

// values are those of selectors' expressions.
func (h *hasher) values(value any, all bool, sort string) {
	switch value := value.(type) {
	case []any:
		for i, item := range value {
			text, isText := item.(string)
			switch {
			case isText && sort == "" && h.nodes[text]:
				value[i] = h.name("node", text)
			case isText && all:
				value[i] = h.name(cmp.Or(sort, "label"), text)
			default:
				h.values(item, all, sort)
			}
		}
	case map[string]any:
		key, _ := value["key"].(string)
		for name, item := range value {
			switch {
			case name == "values" && key == v1.LabelMetadataName && all:
				h.values(item, all, "ns")
			case name == "values" && (key == metav1.ObjectNameField || key == v1.LabelHostname): // of nodes, which may be gone
				h.values(item, true, "node")
			case name == "values":
				h.values(item, all && !isTopology(key), "")
			case name != "key" && name != "operator":
				h.values(item, all, "")
			}
		}
	}
}

// isTopology tells whether a label has values of the cloud, which those of nodes are compared with.
func isTopology(key string) bool {
	return strings.HasPrefix(key, "topology.kubernetes.io/") || strings.HasPrefix(key, "failure-domain.beta.kubernetes.io/")
}

// pool replaces the name of a pool, or that in a slice's spec.pool: mostly it is that of its node, or begins with it and a slash, by which
// the inventory knows whose it is.
func (h *hasher) pool(value any) any {
	switch value := value.(type) {
	case string:
		if h.nodes[value] {
			return h.name("node", value)
		}
		if node, rest, ok := strings.Cut(value, "/"); ok && h.nodes[node] {
			return h.name("node", node) + "/" + h.name("pool", rest)
		}
		return h.name("pool", value)
	case map[string]any:
		value["name"] = h.pool(value["name"])
	}
	return value
}

// keys replaces the keys of an object that are names.
func (h *hasher) keys(sort string, value any) any {
	object, ok := value.(map[string]any)
	if !ok {
		return value
	}
	hashed := map[string]any{}
	for name, item := range object {
		hashed[h.name(sort, name)] = item
	}
	return hashed
}

// items replaces the names of containers, in specs and statuses, or of a pod's volumes.
func (h *hasher) items(sort string, value any) {
	list, _ := value.([]any)
	for i, item := range list {
		switch item := item.(type) {
		case string: // a list of names alone
			list[i] = h.name(sort, item)
		case map[string]any:
			if name, ok := item["name"].(string); ok {
				item["name"] = h.name(sort, name)
			}
		}
	}
}
