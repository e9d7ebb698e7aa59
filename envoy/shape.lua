-- Errors of servers that are not ours, in OpenAI's shape: {"error":{...}} passes as
-- it is, anything else becomes the message of one. 429 and 503 get a Retry-After.
local kinds = {
  [401] = "authentication_error", [403] = "permission_error",
  [429] = "rate_limit_error", [503] = "overloaded_error",
}

-- quoted is text as the inside of a JSON string; what is no ASCII becomes "?".
local function quoted(text)
  return (text:gsub('[%c"\\]', function(c) return string.format("\\u%04x", c:byte()) end):gsub("[\127-\255]+", "?"))
end

-- An answer to HEAD has no body, and must not get one.
function envoy_on_request(handle)
  if handle:headers():get(":method") == "HEAD" then
    handle:streamInfo():dynamicMetadata():set("kvmesh.shape", "head", true)
  end
end

function envoy_on_response(handle)
  if handle:streamInfo():dynamicMetadata():get("kvmesh.shape") then return end
  local headers = handle:headers()
  local status = tonumber(headers:get(":status"))
  if not status or status < 400 then return end
  if (status == 429 or status == 503) and not headers:get("retry-after") then
    headers:add("retry-after", "1")
  end
  local body = handle:body(true) -- waits, and what was fetched before is void then
  headers = handle:headers()
  local text = body:getBytes(0, math.min(body:length(), 2048))
  -- What is compressed cannot be read here, whatever it is.
  local encoding = (headers:get("content-encoding") or "identity"):lower()
  local json = encoding == "identity" and (headers:get("content-type") or ""):find("^application/json")
  if json and text:find('^%s*{%s*"error"%s*:%s*{') then return end
  local plain = text
  if json then -- FastAPI's {"detail":"..."} and the like: the words alone
    plain = text:match('^%s*{%s*"detail"%s*:%s*"([^"\\]*)"%s*}%s*$') or
      text:match('"message"%s*:%s*"([^"\\]*)"') or text
  elseif encoding ~= "identity" or text:find("^%s*<") then
    plain = "" -- a page for people, or nothing to read
  end
  plain = plain:sub(1, 1000)
  local message = "The server answered with status " .. status
  if plain:find("%S") then message = message .. ": " .. quoted(plain) else message = message .. "." end
  local kind = kinds[status] or (status < 500 and "invalid_request_error" or "api_error")
  local code = "null"
  if status == 503 then code = '"service_unavailable"' end
  local out = '{"error":{"message":"' .. message .. '","type":"' .. kind .. '","param":null,"code":' .. code .. "}}"
  body:setBytes(out)
  headers:replace("content-type", "application/json")
  headers:replace("content-length", tostring(#out))
  headers:remove("content-encoding")
end
